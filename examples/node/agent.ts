// One trajectory of an agent through a running mesh: each turn generates tokens and calls a tool, and the last answer is
// scored.
//
//   node agent.js [--scheduler HOST:PORT] [--turns 2] [--max-new-tokens 32] [--prompt TOKEN_ID,TOKEN_ID,...]
//
// Prints one JSON object; what happens on the way goes to stderr. A lost engine costs no token: the step goes on where it
// stopped, on another engine. Which call comes when, and what to do on which error: docs/clients.md.

import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";
import { type DescMessage, fromBinary, type MessageShape } from "@bufbuild/protobuf";
import { type Duration, durationFromMs, durationMs } from "@bufbuild/protobuf/wkt";
import { type CallOptions, Code, ConnectError, createClient, type Transport } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { ErrorInfoSchema, RetryInfoSchema } from "./gen/treadle/common/v1/status_pb.js";
import type { Ticket } from "./gen/treadle/common/v1/ticket_pb.js";
import { EngineService, FinishReason } from "./gen/treadle/engine/v1/engine_pb.js";
import { Outcome, SchedulerService } from "./gen/treadle/scheduler/v1/scheduler_pb.js";
import { RewardsService, RewardState } from "./gen/treadle/tools/v1/rewards_pb.js";
import { ResultStatus, ToolsService } from "./gen/treadle/tools/v1/tools_pb.js";

const CONTROL_MS = 60_000; // a logical call with its repeats: outlasts a restart of the scheduler
const SCHEDULE_MS = 300_000; // a step waits this long for an engine
const STREAM_MS = 24 * 3_600_000; // the stream of a step, with its wait in the queue of the engine
const TOOL_MS = 600_000; // a tool's own limit is shorter
const MAX_FRUITLESS_LOSSES = 5; // engines lost in a row without one new token: the prompt may be what brings them down

// ---- Calls: deadlines, repeats, errors

const transports = new Map<string, Transport>();

/** The connection to a service at host:port, with the certificate in TREADLE_TLS_FOLDER where that is set. Pings notice a
 * machine that vanished without a word. */
function connect(address: string, service: string): Transport {
  let transport = transports.get(address);
  if (!transport) {
    const folder = process.env.TREADLE_TLS_FOLDER;
    const file = (name: string) => readFileSync(`${folder}/${name}`);
    const nodeOptions = folder && {
      ca: file("ca.crt"),
      cert: file("tls.crt"),
      key: file("tls.key"),
      servername: `${service}.treadle`, // a service is known by this name, wherever it listens
    };
    const baseUrl = `${folder ? "https" : "http"}://${address}`;
    transport = createGrpcTransport({ baseUrl, pingIntervalMs: 10_000, pingTimeoutMs: 5_000, ...(nodeOptions && { nodeOptions }) });
    transports.set(address, transport);
  }
  return transport;
}

/** What a failed call says to a program. */
function read(failure: unknown) {
  const error = ConnectError.from(failure);
  // Details travel as google.rpc messages, to which those of treadle.common.v1 are equal on the wire.
  function detail<D extends DescMessage>(schema: D): MessageShape<D> | undefined {
    for (const each of error.details) {
      if ("type" in each && each.type === `google.rpc.${schema.name}`) return fromBinary(schema, each.value);
    }
    return undefined;
  }
  const reason = detail(ErrorInfoSchema)?.reason ?? "";
  const retryAfter = detail(RetryInfoSchema)?.retryDelay;
  // Every error of a service has a reason. One without comes from the connection.
  const broken = !reason && [Code.Canceled, Code.Unknown, Code.Aborted, Code.Internal].includes(error.code);
  const full = error.code === Code.ResourceExhausted && retryAfter !== undefined;
  return {
    error,
    reason,
    full,
    repeatable: full || broken || error.code === Code.Unavailable,
    retryAfterMs: retryAfter ? durationMs(retryAfter) : 0,
  };
}

/** Waits before the next attempt: 50 ms, then twice as long each time up to 1 s, with jitter, and as the server asks. */
async function backOff(attempt: number, atLeastMs = 0): Promise<void> {
  await sleep(Math.max(atLeastMs, Math.min(50 * 2 ** attempt, 1_000) * (0.5 + Math.random() / 2)));
}

/** A unary call. A repeat is the same request with the same request_id, so that nothing is done twice. */
async function call<Q, A>(method: (request: Q, options: CallOptions) => Promise<A>, request: Q, ms: number): Promise<A> {
  let deadline = Date.now() + ms;
  for (let attempt = 0; ; attempt++) {
    try {
      return await method(request, { timeoutMs: Math.max(deadline - Date.now(), 1) });
    } catch (failure) {
      const { error, reason, repeatable, retryAfterMs } = read(failure);
      if (reason === "STEP_HELD") deadline = Date.now() + ms; // the scheduler works, and the step waits for room
      if (!repeatable || Date.now() + retryAfterMs >= deadline) throw error;
      await backOff(attempt, retryAfterMs);
    }
  }
}

/** Clients of the mesh whose scheduler listens at `address`: it knows where the other services are. */
async function connectMesh(address: string) {
  const scheduler = createClient(SchedulerService, connect(address, "scheduler"));
  const { toolsAddress } = await call(scheduler.getDirectory, {}, CONTROL_MS);
  if (!toolsAddress) throw new Error("the mesh runs no tools service");
  const tools = connect(toolsAddress, "tools");
  return { scheduler, tools: createClient(ToolsService, tools), rewards: createClient(RewardsService, tools) };
}
type Mesh = Awaited<ReturnType<typeof connectMesh>>;

/** Runs `work` under a job. Its lease is renewed; should this process die, the scheduler closes what it has open. */
async function underJob<T>({ scheduler }: Mesh, work: (jobId: string) => Promise<T>): Promise<T> {
  const { jobId, leaseTtl } = await call(scheduler.openJob, { requestId: randomUUID() }, CONTROL_MS);
  const renewing = setInterval(
    () => call(scheduler.renewJob, { jobId }, CONTROL_MS).catch((error) => log(`the lease: ${error.message}`)),
    (1_000 * seconds(leaseTtl)) / 3,
  );
  try {
    return await work(jobId);
  } finally {
    clearInterval(renewing);
    await call(scheduler.closeJob, { requestId: randomUUID(), jobId }, CONTROL_MS);
  }
}

// ---- One step: a ticket, and the stream that it opens

class Step {
  engine_ids: string[] = [];
  starts = 0; // admissions by an engine: more than one after a loss or a preemption
  token_ids: number[] = [];
  logprobs: number[] = []; // natural log, one a token
  finish_reason = "";
  queue_s = 0; // these three on the last engine
  prefill_s = 0;
  decode_s = 0;
  tool_output = "";
}

/** Generates one step, on as many engines as it takes. toolMs: what the tool before it took. */
async function generate(
  { scheduler }: Mesh,
  trajectoryId: string,
  turn: number,
  prompt: number[],
  maxNewTokens: number,
  toolMs: number,
): Promise<Step> {
  const step = new Step();
  let replacesTicketId = ""; // of the stream that was lost
  let engineRefused = false; // it did not take the step: nothing is wrong with the engine
  let fruitless = 0;
  for (let attempt = 0; ; attempt++) {
    const [known, starts] = [step.token_ids.length, step.starts];
    const request = {
      requestId: randomUUID(),
      trajectoryId,
      turn,
      contextTokens: prompt.length,
      maxNewTokens,
      replacesTicketId,
      resumedTokens: known,
      engineRefused,
      toolTime: durationFromMs(toolMs),
    };
    const { ticket } = await call(scheduler.scheduleStep, request, SCHEDULE_MS);
    step.engine_ids.push(ticket!.engineId);
    try {
      await stream(ticket!, prompt, maxNewTokens, step);
      return step;
    } catch (failure) {
      if (!(failure instanceof ConnectError)) throw failure;
      const { error, reason, full, repeatable, retryAfterMs } = read(failure);
      const stale = reason === "TICKET_EXPIRED" || reason === "TICKET_WRONG_ENGINE";
      if (step.token_ids.length > known) [attempt, fruitless] = [0, 0];
      else if (step.starts > starts) fruitless++;
      if (!(repeatable || stale) || fruitless === MAX_FRUITLESS_LOSSES) throw error;
      log(`turn ${turn}: ${ticket!.engineId} was lost after ${step.token_ids.length} tokens: ${error.message}`);
      if (step.token_ids.length === maxNewTokens) {
        step.finish_reason = "LENGTH"; // all tokens came, and only the last message is missing
        return step;
      }
      replacesTicketId = ticket!.ticketId;
      engineRefused = full || stale;
      await backOff(attempt, full ? retryAfterMs : 0); // a lost engine asks for time, but the next ticket is for another
    }
  }
}

/** Adds to `step` what one stream brings. Throws where tokens do not join, or the end is missing. */
async function stream(ticket: Ticket, prompt: number[], maxNewTokens: number, step: Step): Promise<void> {
  const request = {
    ticket,
    prompt: { int32Le: packIds(prompt) },
    sampling: { maxNewTokens, temperature: 0 },
    resumedOutput: { int32Le: packIds(step.token_ids) }, // what lost engines have sent
  };
  const engine = createClient(EngineService, connect(ticket.engineAddress, "sidecar"));
  const leaving = new AbortController(); // left early, the engine must not go on; after the end it changes nothing
  const options = { timeoutMs: STREAM_MS, signal: leaving.signal };
  try {
    for await (const { event } of engine.generate(request, options)) {
      switch (event.case) {
        case "started":
          step.starts++;
          break;
        case "tokens": {
          const { offset, tokenIds, logprobs } = event.value;
          if (offset !== step.token_ids.length) throw new Error(`offset ${offset} after ${step.token_ids.length} tokens`);
          step.token_ids.push(...unpack(tokenIds?.int32Le, (view, at) => view.getInt32(at, true)));
          step.logprobs.push(...unpack(logprobs?.float32Le, (view, at) => view.getFloat32(at, true)));
          break;
        }
        case "finished": {
          const { reason, outputTokens, timing } = event.value;
          if (outputTokens !== step.token_ids.length) throw new Error(`${step.token_ids.length} of ${outputTokens} tokens`);
          step.finish_reason = FinishReason[reason];
          step.queue_s = seconds(timing?.queue);
          step.prefill_s = seconds(timing?.prefill);
          step.decode_s = seconds(timing?.decode);
        }
      }
    }
  } finally {
    leaving.abort();
  }
  if (!step.finish_reason) throw new Error("the stream ended without StepFinished");
}

/** Token ids travel as packed little-endian int32, logprobs as float32. */
function packIds(ids: number[]): Uint8Array {
  const view = new DataView(new ArrayBuffer(4 * ids.length));
  ids.forEach((id, index) => view.setInt32(4 * index, id, true));
  return new Uint8Array(view.buffer);
}

function unpack(packed: Uint8Array | undefined, read: (view: DataView, at: number) => number): number[] {
  const { buffer, byteOffset, byteLength } = packed ?? new Uint8Array();
  const view = new DataView(buffer, byteOffset, byteLength);
  return Array.from({ length: view.byteLength / 4 }, (_, index) => read(view, 4 * index));
}

const seconds = (duration: Duration | undefined): number => (duration ? durationMs(duration) / 1_000 : 0);

// ---- The agent

/** Opens a trajectory, plays its turns, asks for its reward and closes it, as failed where anything throws. */
async function runTrajectory(mesh: Mesh, jobId: string, prompt: number[], turns: number, maxNewTokens: number) {
  const opening = { requestId: randomUUID(), jobId, promptId: "node-example", sample: 0, promptTokens: prompt.length };
  const trajectoryId = (await call(mesh.scheduler.openTrajectory, opening, CONTROL_MS)).trajectory!.trajectoryId;
  let outcome = Outcome.FAILED;
  try {
    const context = [...prompt];
    const steps: Step[] = [];
    let toolMs = 0;
    for (let turn = 0; turn < turns; turn++) {
      const step = await generate(mesh, trajectoryId, turn, context, maxNewTokens, toolMs);
      const began = Date.now();
      step.tool_output = await addUp(mesh, trajectoryId, step.token_ids);
      toolMs = Date.now() - began;
      steps.push(step);
      // A real agent renders the tool's output with its tokenizer; here each byte is a token id.
      context.push(...step.token_ids, ...new TextEncoder().encode(step.tool_output));
    }
    const rewardId = await score(mesh, trajectoryId, steps.at(-1)!);
    outcome = Outcome.FINISHED;
    return { trajectory_id: trajectoryId, prompt, steps, rewardId };
  } finally {
    await call(mesh.scheduler.closeTrajectory, { requestId: randomUUID(), trajectoryId, outcome }, CONTROL_MS);
  }
}

/** Calls the tool: Python adds up the token ids. A tool that fails is an answer, which a real agent reads. */
async function addUp({ tools }: Mesh, trajectoryId: string, ids: number[]): Promise<string> {
  const argumentsJson = JSON.stringify({ code: `print(${ids.join(" + ")})` });
  const request = { requestId: randomUUID(), trajectoryId, tool: "python", argumentsJson };
  const result = (await call(tools.invoke, request, TOOL_MS)).result!;
  return result.status === ResultStatus.OK ? result.output : result.error;
}

/** Requests the reward of the last answer. Returns its id at once: the trajectory can be closed while it is computed. */
async function score({ rewards }: Mesh, trajectoryId: string, { token_ids, tool_output }: Step): Promise<string> {
  const expected = String(token_ids.reduce((sum, id) => sum + id, 0));
  const argumentsJson = JSON.stringify({ answer: tool_output.trim(), expected });
  const request = { requestId: randomUUID(), trajectoryId, reward: "exact_match", argumentsJson };
  return (await call(rewards.scoreTrajectory, request, CONTROL_MS)).reward!.rewardId;
}

/** The score, once it is there. For many at once there is WatchRewards. */
async function scoreOf({ rewards }: Mesh, rewardId: string): Promise<number> {
  for (let attempt = 0; ; attempt++) {
    const { reward } = await call(rewards.getReward, { rewardId }, CONTROL_MS);
    if (reward!.state === RewardState.DONE) return reward!.score!;
    if (reward!.state > RewardState.DONE) throw new Error(`no score: ${RewardState[reward!.state]} ${reward!.error}`);
    await backOff(attempt);
  }
}

function log(line: string): void {
  process.stderr.write(`${line}\n`);
}

async function main(): Promise<void> {
  const text = { type: "string" } as const;
  const { values } = parseArgs({ options: { scheduler: text, turns: text, "max-new-tokens": text, prompt: text } });
  const prompt = (values.prompt ?? "504,2365,354,314,253").split(",").map(Number);
  const [turns, maxNewTokens] = [Number(values.turns ?? 2), Number(values["max-new-tokens"] ?? 32)];
  const mesh = await connectMesh(values.scheduler ?? "localhost:7401");
  const { rewardId, ...trajectory } = await underJob(mesh, (jobId) =>
    runTrajectory(mesh, jobId, prompt, turns, maxNewTokens),
  );
  console.log(JSON.stringify({ ...trajectory, score: await scoreOf(mesh, rewardId) }));
}

try {
  await main();
  process.exit(0); // the deadline of a stream that was left would keep the process until it passes
} catch (error) {
  log(`agent.js: ${error instanceof Error ? error.message : error}`);
  process.exit(1);
}
