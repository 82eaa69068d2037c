// Streams an answer of the engine, then prints its counts: go run . [ADDRESS [PROMPT]]
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"client/enginev1"
)

// argument is the command line's, or what it is by default.
func argument(index int, preset string) string {
	if len(os.Args) > index {
		return os.Args[index]
	}
	return preset
}

// reason is the one in an error's details, which is what a program should go by.
func reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return status.Code(err).String()
}

func run() error {
	connection, err := grpc.NewClient(
		argument(1, "127.0.0.1:50051"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	engine := enginev1.NewEngineServiceClient(connection)

	// When the deadline is over, or the context is cancelled, the engine ends the request.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stream, err := engine.Generate(ctx, &enginev1.GenerateRequest{
		Prompt:   &enginev1.Prompt{Input: &enginev1.Prompt_Text{Text: argument(2, "ROMEO:")}},
		Sampling: &enginev1.Sampling{Temperature: proto.Float32(0), Seed: proto.Uint64(1)},
		Stopping: &enginev1.Stopping{MaxTokens: proto.Uint32(24)},
	})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		fmt.Print(response.Text)
		if finish := response.Finish; finish != nil {
			fmt.Printf("\n%v: %d tokens\n", finish.Reason, finish.Usage.CompletionTokens)
		}
	}
	stats, err := engine.GetStats(ctx, &enginev1.GetStatsRequest{})
	if err != nil {
		return err
	}
	fmt.Printf("requests finished so far: %d\n", stats.FinishedRequests)
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s\n", reason(err), status.Convert(err).Message())
		os.Exit(1)
	}
}
