// One step through a running mesh, straight from protos/: open a trajectory, schedule a step, stream its tokens, close.
//
//   node generate.mjs [SCHEDULER] [TOKEN_ID,TOKEN_ID,...] [MAX_NEW_TOKENS]
//
// Prints one JSON object: token ids, logprobs (natural log), weight versions, and why the step ended. Any language with a gRPC
// library can do the same: the only thing to know beyond the protos is that token ids travel as packed little-endian int32 and
// logprobs as float32 (treadle/common/v1/tokens.proto).

import { randomUUID } from "node:crypto";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const protos = join(dirname(fileURLToPath(import.meta.url)), "../../protos");
const definition = await protoLoader.load(
  ["treadle/scheduler/v1/scheduler.proto", "treadle/engine/v1/engine.proto"],
  { includeDirs: [protos], keepCase: true, enums: String, longs: Number, defaults: true, oneofs: true },
);
const { treadle } = grpc.loadPackageDefinition(definition);

const CONTROL_MS = 30_000; // every call needs a deadline; the mesh refuses one without
const STEP_MS = 600_000;
const within = (ms) => ({ deadline: Date.now() + ms });

/** A unary call as a promise. */
function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, within(CONTROL_MS), (error, response) => (error ? reject(error) : resolve(response)));
  });
}

/** Packed little-endian int32, 4 bytes a token. */
function packIds(ids) {
  const packed = Buffer.alloc(4 * ids.length);
  ids.forEach((id, index) => packed.writeInt32LE(id, 4 * index));
  return packed;
}

function unpack(packed, read) {
  if (packed.length % 4) throw new Error(`${packed.length} bytes are not a whole number of 4-byte items`);
  return Array.from({ length: packed.length / 4 }, (_, index) => read.call(packed, 4 * index));
}
const unpackIds = (packed) => unpack(packed, Buffer.prototype.readInt32LE);
const unpackLogprobs = (packed) => unpack(packed, Buffer.prototype.readFloatLE);

/** Streams one step; throws where an offset does not join or the engine counts other tokens than arrived. */
async function generate(engine, request) {
  const output = { token_ids: [], logprobs: [], weight_versions: [], finish_reason: "" };
  const stream = engine.Generate(request, within(STEP_MS));
  try {
    for await (const response of stream) {
      if (response.event === "tokens") {
        const { offset, token_ids, logprobs, weight_version } = response.tokens;
        if (offset !== output.token_ids.length) throw new Error(`offset ${offset} after ${output.token_ids.length} tokens`);
        output.token_ids.push(...unpackIds(token_ids.int32_le));
        output.logprobs.push(...unpackLogprobs(logprobs.float32_le));
        if (output.weight_versions.at(-1) !== weight_version) output.weight_versions.push(weight_version);
      } else if (response.event === "finished") {
        if (response.finished.output_tokens !== output.token_ids.length) throw new Error("tokens are missing");
        output.finish_reason = response.finished.reason;
      }
    }
  } finally {
    stream.cancel(); // left early, the engine must not go on; after the end it changes nothing
  }
  if (!output.finish_reason) throw new Error("the stream ended without StepFinished");
  return output;
}

async function main([address = "localhost:7401", ids = "504,2365,354,314,253", maxNewTokens = "16"]) {
  const prompt = ids.split(",").map(Number);
  const scheduler = new treadle.scheduler.v1.SchedulerService(address, grpc.credentials.createInsecure());
  const { trajectory } = await call(scheduler, "OpenTrajectory", {
    request_id: randomUUID(),
    prompt_id: "node-example",
    sample: 0,
    prompt_tokens: prompt.length,
  });
  const { trajectory_id } = trajectory;
  let outcome = "OUTCOME_FAILED";
  try {
    const { ticket } = await call(scheduler, "ScheduleStep", {
      request_id: randomUUID(),
      trajectory_id,
      turn: 0,
      context_tokens: prompt.length,
      max_new_tokens: Number(maxNewTokens),
    });
    const engine = new treadle.engine.v1.EngineService(ticket.engine_address, grpc.credentials.createInsecure());
    const output = await generate(engine, {
      ticket,
      prompt: { int32_le: packIds(prompt) },
      sampling: { max_new_tokens: Number(maxNewTokens), temperature: 0 },
    }).finally(() => engine.close());
    outcome = "OUTCOME_FINISHED";
    console.log(JSON.stringify({ trajectory_id, engine_id: ticket.engine_id, prompt, ...output }));
  } finally {
    await call(scheduler, "CloseTrajectory", { request_id: randomUUID(), trajectory_id, outcome });
    scheduler.close();
  }
}

try {
  await main(process.argv.slice(2));
} catch (error) {
  console.error(`generate.mjs: ${error.message}`);
  process.exitCode = 1;
}
