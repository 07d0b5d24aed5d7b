// The AI SDK: its default for OpenAI (Responses), chat, other servers, and Anthropic's Messages.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import {
  CALLING_KEY, CALLING_MODEL, CALLING_URL, KEY, MODEL, NUM_SEEN, NUM_TURNS, PICTURE, SEEING_KEY, SEEING_MODEL, SEEING_URL,
  THINKING_KEY, THINKING_MODEL, THINKING_URL, URL, check, checkPerson, run,
} from "./cells.mjs";

const openai = createOpenAI({ baseURL: `${URL}/v1`, apiKey: KEY });
const compatible = createOpenAICompatible({
  name: "headrace", baseURL: `${URL}/v1`, apiKey: KEY, supportsStructuredOutputs: true, includeUsage: true,
});
const anthropic = createAnthropic({ baseURL: `${URL}/v1`, apiKey: KEY });
const thinking = { baseURL: `${THINKING_URL}/v1`, apiKey: THINKING_KEY };
const seeing = { baseURL: `${SEEING_URL}/v1`, apiKey: SEEING_KEY };
// It knows the models that think by their names.
const summaries = { openai: { reasoningSummary: "auto", forceReasoning: true } };
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

async function look(model, answer = generateText) {
  const content = [
    { type: "image", image: Buffer.from(PICTURE, "base64"), mediaType: "image/png" }, { type: "text", text: "Look" },
  ];
  const { usage } = await answer({ model, maxRetries: 0, maxOutputTokens: 16, messages: [{ role: "user", content }] });
  check((await usage).inputTokens === NUM_SEEN, await usage);
}

// By its APIs: Responses, chat and Anthropic's Messages.
const models = [openai(MODEL), openai.chat(MODEL), compatible(MODEL), anthropic(MODEL)];
const person = { person: tool({ inputSchema: schema, strict: true, execute: async () => "stored" }) };
const forced = { tools: person, toolChoice: "required", maxOutputTokens: 400, providerOptions: {
  openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } } };

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
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
  stop: async () => {
    const ask = { ...common, model: openai.chat(MODEL), maxOutputTokens: 20, temperature: 0 };
    const whole = (await generateText(ask)).text;
    const cut = await generateText({ ...ask, stopSequences: [whole.slice(4, 7)] });
    check(cut.text === whole.slice(0, whole.indexOf(whole.slice(4, 7))) && cut.finishReason === "stop", [whole, cut.text]);
  },
  "tool call": async () => {
    for (const model of models.slice(0, 2).concat(models.slice(3))) {
      const answer = await generateText({ ...common, ...forced, model });
      checkPerson(answer.toolCalls[0].input);
      check(answer.toolResults[0].output === "stored" && answer.finishReason === "tool-calls", answer.finishReason);
    }
  },
  "streamed tool call": async () => {
    for (const model of models.slice(0, 2).concat(models.slice(3))) {
      const parts = await all(streamText({ ...common, ...forced, model }).fullStream);
      checkPerson(parts.find((part) => part.type === "tool-call").input);
      check(parts.some((part) => part.type === "tool-result" && part.output === "stored"), parts.length);
    }
  },
  "streamed objects": async () => {
    for (const model of models) {
      const stream = streamObject({ ...common, model, schema, maxOutputTokens: 400 });
      await all(stream.partialObjectStream);
      checkPerson(await stream.object);
    }
  },
  "cancelled streams": async () => {
    for (const model of models) {
      const stop = new AbortController();
      const stream = streamText({ ...common, model, maxOutputTokens: 1500, abortSignal: stop.signal });
      const kinds = [];
      for await (const part of stream.fullStream) {
        kinds.push(part.type);
        if (part.type === "text-delta") stop.abort();
      }
      check(kinds.at(-1) === "abort", kinds);
    }
  },
  "typed errors": async () => {
    for (const model of [openai("nobody"), openai.chat("nobody"), compatible("nobody"), anthropic("nobody")]) {
      const error = await generateText({ ...common, model, maxOutputTokens: 8 }).catch((error) => error);
      check(APICallError.isInstance(error) && error.statusCode === 404 && !error.isRetryable, error);
      check(error.message.includes("GET /v1/models"), error.message);
    }
  },
  records: async () => {
    const places = z.object({ places: z.record(z.enum(["x", "y"]), z.number().int().min(0).max(99)) });
    for (const model of [compatible(MODEL), openai(MODEL)]) {
      const answer = await generateObject({ ...common, model, schema: places, maxOutputTokens: 200, temperature: 0 });
      check(Object.keys(answer.object.places).sort().join() === "x,y", answer.object);
    }
  },
  "call of a tool that was not offered": async () => {
    const model = createOpenAI({ baseURL: `${CALLING_URL}/v1`, apiKey: CALLING_KEY }).chat(CALLING_MODEL);
    const tools = { person: tool({ inputSchema: schema, execute: async () => "stored" }) };
    const answer = await generateText({ ...common, model, tools, maxOutputTokens: 50, stopWhen: stepCountIs(2) });
    const calls = answer.steps.flatMap((step) => step.toolCalls);
    check(calls.length === 2 && calls.every((call) => call.toolName === "nobody" && call.invalid), calls);
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
  "reasoning in chat": async () => {
    const model = createOpenAICompatible({ name: "headrace", ...thinking })(THINKING_MODEL);
    const answer = await generateText({ ...common, model, maxOutputTokens: 8 });
    check(answer.reasoningText, answer);
  },
  "reasoning as summaries": async () => {
    const ask = { ...common, model: createOpenAI(thinking)(THINKING_MODEL), maxOutputTokens: 16, providerOptions: summaries };
    const stream = streamText(ask);
    let told = "";
    for await (const part of stream.fullStream) if (part.type === "reasoning-delta") told += part.text;
    check(told);
    check((await generateText(ask)).reasoningText);
  },
  "encrypted reasoning": async () => {
    const providerOptions = { openai: { ...summaries.openai, store: false } };
    const ask = { model: createOpenAI(thinking)(THINKING_MODEL), maxRetries: 0, maxOutputTokens: 16, providerOptions };
    const messages = [{ role: "user", content: "hello" }];
    const first = await generateText({ ...ask, messages });
    const again = [...messages, ...first.response.messages, { role: "user", content: "again" }];
    const second = await generateText({ ...ask, messages: again });
    const sent = second.request.body.input.filter((item) => item.type === "reasoning");
    check(sent.length === 1 && sent[0].encrypted_content && second.reasoningText, second.request.body);
  },
  thinking: async () => {
    const providerOptions = { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } };
    const model = createAnthropic(thinking)(THINKING_MODEL);
    const answer = await generateText({ ...common, model, maxOutputTokens: 16, providerOptions });
    check(answer.reasoningText, answer);
  },
  Messages: async () => {
    const answer = await generateText({ ...common, model: anthropic(MODEL), maxOutputTokens: 8 });
    check(answer.text, answer);
  },
  "Messages with tools": () => loop(anthropic(MODEL)),
  images: async () => {
    await look(createOpenAI(seeing).chat(SEEING_MODEL));
    await look(createOpenAICompatible({ name: "headrace", ...seeing })(SEEING_MODEL));
  },
  "images in Responses": () => look(createOpenAI(seeing)(SEEING_MODEL)),
  "images in Messages": () => look(createAnthropic(seeing)(SEEING_MODEL)),
  "streamed images": async () => {
    for (const make of [createOpenAI(seeing), createOpenAI(seeing).chat, createAnthropic(seeing)]) {
      await look(make(SEEING_MODEL), streamText);
    }
  },
});
