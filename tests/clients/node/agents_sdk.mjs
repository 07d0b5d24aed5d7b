// OpenAI's Agents SDK for Node, on chat completions and on the Responses API.

import {
  Agent, MaxTurnsExceededError, MemorySession, OpenAIChatCompletionsModel, OpenAIResponsesModel, run as runAgent,
  setTracingDisabled, tool,
} from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { check, checkPerson, KEY, MODEL, NUM_TURNS, run, THINKING_KEY, THINKING_MODEL, THINKING_URL, URL } from "./cells.mjs";

// It sends traces to OpenAI otherwise.
setTracingDisabled(true);

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0 });
const thinking = new OpenAI({ baseURL: `${THINKING_URL}/v1`, apiKey: THINKING_KEY, maxRetries: 0 });
const Person = z.object({ name: z.string().max(8), age: z.number().int().min(0).max(120) });
const chatModel = () => new OpenAIChatCompletionsModel(client, MODEL);
const responsesModel = () => new OpenAIResponsesModel(client, MODEL);
// It takes a response that a limit has ended for a failure, and a schema ends by itself.
const ending = (model) => new Agent({ name: "a", model: model(), outputType: Person, modelSettings: { maxTokens: 300 } });
const store = tool({
  name: "store", description: "Store an age.", parameters: z.object({ number: z.enum(["1", "2", "3"]) }),
  execute: async () => "stored",
});

async function schema(model) {
  checkPerson((await runAgent(ending(model), "Somebody, please.")).finalOutput);
}

async function stream(model) {
  const result = await runAgent(ending(model), "Somebody, please.", { stream: true });
  const kinds = new Set();
  for await (const event of result) kinds.add(event.type);
  await result.completed;
  check(kinds.has("raw_model_stream_event"), [...kinds]);
  checkPerson(result.finalOutput);
}

async function loop(model) {
  const settings = { maxTokens: 100, toolChoice: "required", parallelToolCalls: false };
  const agent = new Agent({
    name: "a", model: model(), tools: [store], modelSettings: settings, resetToolChoice: false,
  });
  try {
    await runAgent(agent, "Somebody, please.", { maxTurns: NUM_TURNS });
  } catch (error) {
    if (!(error instanceof MaxTurnsExceededError)) throw error;
    return;
  }
  throw new Error("a model that has to call a tool in every turn did not");
}

async function turns(agent) {
  for (const isStreamed of [false, true]) {
    const session = new MemorySession();
    for (let turn = 0; turn < 3; turn += 1) {
      const result = await runAgent(agent, `turn ${turn}`, { session, stream: isStreamed });
      if (isStreamed) await result.completed;
    }
    check((await session.getItems()).length === 6, await session.getItems());
  }
}

await run({
  chat: async () => {
    const agent = new Agent({ name: "a", model: chatModel(), modelSettings: { maxTokens: 8 } });
    check((await runAgent(agent, "hello")).finalOutput);
  },
  stream: () => stream(chatModel),
  "JSON schema": () => schema(chatModel),
  "loop of tool calls": () => loop(chatModel),
  "streamed Responses": () => stream(responsesModel),
  "Responses with a schema": () => schema(responsesModel),
  "Responses with tools": () => loop(responsesModel),
  // The library repeats the fields of an answer's message in the part with its text.
  "conversations kept by the client": async () => {
    await turns(ending(chatModel));
    await turns(ending(responsesModel));
  },
  "conversations kept by the server": async () => {
    const first = await runAgent(ending(responsesModel), "Somebody, please.");
    checkPerson((await runAgent(ending(responsesModel), "more", { previousResponseId: first.lastResponseId })).finalOutput);
  },
  "reasoning in chat": async () => {
    const model = new OpenAIChatCompletionsModel(thinking, THINKING_MODEL);
    const agent = new Agent({ name: "a", model, modelSettings: { maxTokens: 12 } });
    const session = new MemorySession();
    for (let turn = 0; turn < 2; turn += 1) await runAgent(agent, `turn ${turn}`, { session });
    check((await session.getItems()).some((item) => item.type === "reasoning"), await session.getItems());
  },
});
