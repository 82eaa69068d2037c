// Follows a publisher with llm-d's own subscriber, pool and index, and says for prompts on stdin how many blocks each
// pod is known to have of them.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"

	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/llm-d/llm-d-router/pkg/kvcache/kvblock"
	"github.com/llm-d/llm-d-router/pkg/kvevents"
	"github.com/llm-d/llm-d-router/pkg/kvevents/engineadapter"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	ctx := context.Background()
	index, err := kvblock.NewInMemoryIndex(kvblock.DefaultInMemoryIndexConfig())
	check(err)
	config := kvblock.DefaultTokenProcessorConfig()
	config.BlockSizeTokens = 4
	tokens, err := kvblock.NewChunkedTokenDatabase(config)
	check(err)
	adapter, err := engineadapter.NewAdapter("vllm")
	check(err)
	pool := kvevents.NewPool(kvevents.DefaultConfig(), index, tokens, adapter)
	pool.Start(ctx)
	replay := ""
	if len(os.Args) > 2 {
		replay = "tcp://" + os.Args[2]
	}
	check(kvevents.NewSubscriberManager(pool).EnsureSubscriber(ctx, "daemon", "", "tcp://"+os.Args[1], replay, "kv@", true))
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var prompt []uint32
		check(json.Unmarshal(lines.Bytes(), &prompt))
		keys, err := tokens.TokensToKVBlockKeys(kvblock.EmptyBlockHash, prompt, "pool", nil)
		check(err)
		found, err := index.Lookup(ctx, keys, sets.New[string]())
		check(err)
		have := map[string]int{}
		for at, key := range keys {
			for _, entry := range found[key] {
				if have[entry.PodIdentifier] == at {
					have[entry.PodIdentifier]++
				}
			}
		}
		out, _ := json.Marshal(have)
		fmt.Println(string(out))
	}
}
