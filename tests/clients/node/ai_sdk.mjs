// The AI SDK: its default for OpenAI (Responses), chat, other servers, and Anthropic's Messages.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, NUM_TURNS, URL, check, checkPerson, run } from "./cells.mjs";

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const compatible = createOpenAICompatible({
  name: "headrace", baseURL: `${URL}/v1`, apiKey: KEY, supportsStructuredOutputs: true, includeUsage: true,
});
const anthropic = createAnthropic({ baseURL: `${URL}/v1`, apiKey: KEY });
const schema = z.object({ name: z.string().max(8), age: z.number().int().min(0).max(120) });
const prompt = "Somebody, please.";
const common = { prompt, maxRetries: 0 };

async function loop(model) {
  let calls = 0;
  await generateText({
    ...common, model, maxOutputTokens: 200, toolChoice: "required", stopWhen: stepCountIs(NUM_TURNS),
    // The demo model would go on calling.
    providerOptions: { openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } },
    tools: { person: tool({ inputSchema: schema, strict: true, execute: async (value) => { checkPerson(value); calls++; return "stored"; } }) },
  });
  check(calls >= NUM_TURNS, calls);
}

await run({
  chat: async () => {
    const answer = await generateText({ ...common, model: openai.chat(MODEL), maxOutputTokens: 8 });
    check(answer.text && answer.usage.outputTokens <= 8, answer.usage);
  },
  "stream with usage": async () => {
    const stream = streamText({ ...common, model: compatible(MODEL), maxOutputTokens: 8 });
    check((await stream.text) && (await stream.usage).outputTokens <= 8);
  },
  "JSON schema": async () => {
    const answer = await generateObject({ ...common, model: compatible(MODEL), schema, maxOutputTokens: 400 });
    checkPerson(answer.object);
  },
  "loop of tool calls": () => loop(openai.chat(MODEL)),
  embeddings: async () => {
    const answer = await embed({ model: openai.textEmbeddingModel(MODEL), value: "a", maxRetries: 0 });
    check(answer.embedding.length > 8);
  },
  Responses: async () => {
    const answer = await generateText({ ...common, model: openai(MODEL), maxOutputTokens: 16 });
    check(answer.text, answer);
  },
  "streamed Responses": async () => {
    check(await streamText({ ...common, model: openai(MODEL), maxOutputTokens: 16 }).text);
  },
  "Responses with tools": () => loop(openai(MODEL)),
  Messages: async () => {
    const answer = await generateText({ ...common, model: anthropic(MODEL), maxOutputTokens: 8 });
    check(answer.text, answer);
  },
  "Messages with tools": () => loop(anthropic(MODEL)),
});
