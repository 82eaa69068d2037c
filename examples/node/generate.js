// Streams an answer of the engine, then prints its counts: node generate.js PROTOS [ADDRESS [PROMPT]]
"use strict";

const { promisify } = require("node:util");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [protos, address = "127.0.0.1:50051", prompt = "ROMEO:"] = process.argv.slice(2);
const definition = loader.loadSync(["rocmforge/engine/v1/engine.proto", "google/rpc/error_details.proto"], {
  includeDirs: [protos],
  enums: String,
  longs: String, // a seed has 64 bits, a number of JavaScript 53
});
const { EngineService } = grpc.loadPackageDefinition(definition).rocmforge.engine.v1;

// The reason in an error's details, which is what a program should go by.
function reason(error) {
  const [bytes] = error.metadata?.get("grpc-status-details-bin") ?? [];
  const details = bytes ? definition["google.rpc.Status"].deserialize(bytes).details : [];
  const info = details.find((detail) => detail.type_url.endsWith("/google.rpc.ErrorInfo"));
  return info ? definition["google.rpc.ErrorInfo"].deserialize(info.value).reason : grpc.status[error.code];
}

async function main() {
  const client = new EngineService(address, grpc.credentials.createInsecure());
  const request = { prompt: { text: prompt }, sampling: { temperature: 0, seed: 1 }, stopping: { maxTokens: 24 } };
  // When the deadline is over, or the stream is cancelled, the engine ends the request.
  for await (const response of client.Generate(request, { deadline: Date.now() + 60_000 })) {
    process.stdout.write(response.text ?? "");
    if (response.finish) {
      const { reason, usage } = response.finish;
      console.log(`\n${reason}: ${usage.completionTokens} tokens`);
    }
  }
  const stats = await promisify(client.GetStats.bind(client))({});
  console.log(`requests finished so far: ${stats.finishedRequests}`);
  client.close();
}

main().catch((error) => {
  if (error.code === undefined) throw error;
  console.error(`${reason(error)}: ${error.details}`);
  process.exitCode = 1;
});
