// OpenAI's own library for Node.

import OpenAI from "openai";
import { KEY, MODEL, NUM_TURNS, SCHEMA, URL, check, checkPerson, run } from "./cells.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "Somebody, please." }];
const tool = { type: "function", function: { name: "person", parameters: SCHEMA, strict: true } };

await run({
  chat: async () => {
    const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 8 });
    check(answer.choices[0].message.content && answer.usage.completion_tokens <= 8, answer);
  },
  "stream with usage": async () => {
    const stream = client.chat.completions.stream({
      model: MODEL, messages, max_tokens: 8, stream_options: { include_usage: true },
    });
    check((await stream.finalContent()) && (await stream.totalUsage()).completion_tokens <= 8);
  },
  "JSON schema": async () => {
    const format = { type: "json_schema", json_schema: { name: "person", schema: SCHEMA, strict: true } };
    const answer = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 400, response_format: format,
    });
    checkPerson(JSON.parse(answer.choices[0].message.content));
  },
  "tool call": async () => {
    const answer = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 400, tools: [tool], tool_choice: "required",
      parallel_tool_calls: false,
    });
    checkPerson(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
  },
  "streamed tool call": async () => {
    const stream = client.chat.completions.stream({
      model: MODEL, messages, max_tokens: 400, tools: [tool], tool_choice: "required",
      parallel_tool_calls: false,
    });
    const answer = await stream.finalChatCompletion();
    checkPerson(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
  },
  "loop of tool calls": async () => {
    const history = [...messages];
    for (let turn = 0; turn < NUM_TURNS; turn++) {
      const answer = await client.chat.completions.create({
        model: MODEL, messages: history, max_tokens: 200, tools: [tool], tool_choice: "required",
        parallel_tool_calls: false,
      });
      const message = answer.choices[0].message;
      checkPerson(JSON.parse(message.tool_calls[0].function.arguments));
      history.push(message, { role: "tool", tool_call_id: message.tool_calls[0].id, content: "stored" });
    }
  },
  embeddings: async () => {
    const answer = await client.embeddings.create({ model: MODEL, input: ["a", "b"] });
    check(answer.data.length === 2 && answer.data[0].embedding.length > 8, answer.data.length);
  },
  Responses: async () => {
    const answer = await client.responses.create({ model: MODEL, input: "hello", max_output_tokens: 8 });
    check(answer.output_text, answer);
  },
  "typed errors": async () => {
    try {
      await client.chat.completions.create({ model: "nobody", messages });
    } catch (error) {
      check(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", error);
      return;
    }
    check(false);
  },
});
