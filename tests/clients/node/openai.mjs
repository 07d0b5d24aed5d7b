// OpenAI's own library for Node.

import OpenAI, { toFile } from "openai";
import { z } from "zod";
import {
  CALLING_KEY, CALLING_MODEL, CALLING_URL, KEY, MODEL, NUM_SEEN, NUM_TURNS, PICTURE, SCHEMA, SEEING_KEY, SEEING_MODEL,
  SEEING_URL, THINKING_KEY, THINKING_MODEL, THINKING_URL, URL, check, checkPerson, run,
} from "./cells.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0, timeout: 120_000 });
const thinking = new OpenAI({ baseURL: `${THINKING_URL}/v1`, apiKey: THINKING_KEY, maxRetries: 0, timeout: 120_000 });
const calling = new OpenAI({ baseURL: `${CALLING_URL}/v1`, apiKey: CALLING_KEY, maxRetries: 0, timeout: 120_000 });
const seeing = new OpenAI({ baseURL: `${SEEING_URL}/v1`, apiKey: SEEING_KEY, maxRetries: 0, timeout: 120_000 });
const point = z.object({ places: z.record(z.enum(["x", "y"]), z.number().int().min(0).max(99)) });
const thought = { model: THINKING_MODEL, input: "hello", max_output_tokens: 16 };
const messages = [{ role: "user", content: "Somebody, please." }];
const tool = { type: "function", function: { name: "person", parameters: SCHEMA, strict: true } };

const batchLines = () => [0, 1, 2].map((number) => JSON.stringify({
  custom_id: `line-${number}`, method: "POST", url: "/v1/completions",
  body: { model: MODEL, prompt: "x =", max_tokens: 4 },
}) + "\n").join("");

async function look(part) {
  const content = [{ type: "image_url", image_url: part }, { type: "text", text: "Look" }];
  const { usage } = await seeing.chat.completions.create({
    model: SEEING_MODEL, messages: [{ role: "user", content }], max_tokens: 4,
  });
  check(usage.prompt_tokens === NUM_SEEN, usage);
}

async function answer(part) {
  const content = [{ type: "input_image", detail: "auto", ...part }, { type: "input_text", text: "Look" }];
  const { usage } = await seeing.responses.create({
    model: SEEING_MODEL, input: [{ role: "user", content }], max_output_tokens: 4,
  });
  check(usage.input_tokens === NUM_SEEN, usage);
}

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
  "text completion": async () => {
    const answer = await client.completions.create({ model: MODEL, prompt: ["x =", "y ="], max_tokens: 4 });
    check(answer.choices.length === 2 && answer.choices[1].index === 1, answer);
  },
  "choices and logprobs": async () => {
    const answer = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 4, n: 3, seed: 1, logprobs: true, top_logprobs: 2,
    });
    check(answer.choices.length === 3 && answer.choices[0].logprobs.content[0].top_logprobs.length === 2, answer);
  },
  best_of: async () => {
    const answer = await client.completions.create({ model: MODEL, prompt: "x", max_tokens: 4, best_of: 3, ignore_eos: true });
    // Those that were not chosen count too.
    check(answer.choices.length === 1 && answer.usage.completion_tokens === 12, answer);
  },
  stop: async () => {
    const ask = { model: MODEL, prompt: "x", max_tokens: 12, temperature: 0 };
    const whole = (await client.completions.create(ask)).choices[0].text;
    const cut = await client.completions.create({ ...ask, stop: [whole.slice(3, 6)] });
    check(cut.choices[0].text === whole.slice(0, whole.indexOf(whole.slice(3, 6))), cut);
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
  files: async () => {
    const data = batchLines();
    const file = await client.files.create({ file: await toFile(Buffer.from(data), "lines.jsonl"), purpose: "batch" });
    check(file.bytes === data.length && file.filename === "lines.jsonl", file);
    check((await (await client.files.content(file.id)).text()) === data);
    const ids = [];
    for await (const each of client.files.list({ limit: 1 })) ids.push(each.id);
    check(ids.includes(file.id), ids);
    check((await client.files.delete(file.id)).deleted);
  },
  batches: async () => {
    const file = await client.files.create({
      file: await toFile(Buffer.from(batchLines()), "lines.jsonl"), purpose: "batch",
    });
    let batch = await client.batches.create({
      input_file_id: file.id, endpoint: "/v1/completions", completion_window: "24h",
    });
    while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
      await new Promise((resolve) => setTimeout(resolve, 200));
      batch = await client.batches.retrieve(batch.id);
    }
    check(batch.status === "completed" && batch.request_counts.completed === 3, batch);
    const output = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map(JSON.parse);
    check(new Set(output.map((line) => line.custom_id)).size === 3, output);
    check(output.every((line) => line.response.body.object === "text_completion"), output);
  },
  "batches with tools": async () => {
    const asked = {
      model: MODEL, messages, max_tokens: 200, tools: [tool], tool_choice: "required", parallel_tool_calls: false,
    };
    const line = { custom_id: "one", method: "POST", url: "/v1/chat/completions", body: asked };
    const file = await client.files.create({
      file: await toFile(Buffer.from(JSON.stringify(line)), "lines.jsonl"), purpose: "batch",
    });
    let batch = await client.batches.create({
      input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h",
    });
    while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
      await new Promise((resolve) => setTimeout(resolve, 200));
      batch = await client.batches.retrieve(batch.id);
    }
    const { response } = JSON.parse(await (await client.files.content(batch.output_file_id)).text());
    const [{ finish_reason, message }] = response.body.choices;
    check(finish_reason === "tool_calls" && message.tool_calls.length === 1, response.body);
    checkPerson(JSON.parse(message.tool_calls[0].function.arguments));
  },
  models: async () => {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    check(ids.includes(MODEL), ids);
  },
  "streamed Responses": async () => {
    const kinds = [];
    for await (const event of client.responses.stream({ model: MODEL, input: "hello", max_output_tokens: 8 })) {
      kinds.push(event.type);
    }
    check(kinds[0] === "response.created" && kinds.includes("response.output_text.delta"), kinds);
  },
  "Responses with tools": async () => {
    const answer = await client.responses.create({
      model: MODEL, input: "somebody", max_output_tokens: 400, tool_choice: "required", parallel_tool_calls: false,
      tools: [{ type: "function", name: "person", parameters: SCHEMA, strict: true }],
    });
    const call = answer.output.find((item) => item.type === "function_call");
    checkPerson(JSON.parse(call.arguments));
  },
  "resumed streams": async () => {
    const events = [];
    const ask = { model: MODEL, input: "hello", max_output_tokens: 100, background: true, stream: true };
    for await (const event of await client.responses.create(ask)) {
      events.push(event);
      if (events.length === 4) break;
    }
    const resume = (after) => client.responses.retrieve(events[0].response.id, { stream: true, starting_after: after });
    for await (const event of await resume(events.at(-1).sequence_number)) events.push(event);
    check(events.every((event, index) => event.sequence_number === index), events.map((event) => event.sequence_number));
    check(["response.completed", "response.incomplete"].includes(events.at(-1).type), events.at(-1));
    for await (const event of await resume(events.at(-1).sequence_number)) check(false, event);
  },
  "resumed chat streams": async () => {
    const ask = { model: MODEL, messages, max_tokens: 40, temperature: 0, stream: true };
    const options = { stream_options: { include_usage: true, resumable: true } };
    const { data, response } = await client.chat.completions.create({ ...ask, ...options }).withResponse();
    const path = `/streams/${response.headers.get("x-request-id")}`;
    const told = async (stream, most = Infinity) => {
      const chunks = [];
      for await (const chunk of stream) if (chunks.push(chunk) === most) break;
      return chunks;
    };
    const read = await told(data, 4);
    const whole = await told(await client.get(path, { query: { from: 0 }, stream: true }));
    check(JSON.stringify(whole.slice(0, 4)) === JSON.stringify(read), whole);
    check(whole.at(-1).usage.completion_tokens > 0, whole.at(-1));
    const rest = await told(await client.get(path, { headers: { "Last-Event-ID": "3" }, stream: true }));
    check(JSON.stringify(rest) === JSON.stringify(whole.slice(4)), rest);
  },
  "requests repeated by their key": async () => {
    const ask = { model: MODEL, messages, max_tokens: 8, temperature: 1 };
    const once = { headers: { "Idempotency-Key": `key-${Date.now()}-${Math.random()}` } };
    const [first, again] = [await client.chat.completions.create(ask, once), await client.chat.completions.create(ask, once)];
    check(first.id === again.id && first.choices[0].message.content === again.choices[0].message.content, again);
  },
  "reasoning in chat": async () => {
    const answer = await thinking.chat.completions.create({ model: THINKING_MODEL, messages, max_tokens: 8 });
    check(answer.choices[0].message.reasoning_content, answer);
  },
  "reasoning in Responses": async () => {
    const answer = await thinking.responses.create(thought);
    check(answer.output[0].type === "reasoning" && answer.output[0].content[0].text, answer);
  },
  "reasoning as summaries": async () => {
    let told = "";
    for await (const event of thinking.responses.stream({ ...thought, reasoning: { summary: "auto" } })) {
      if (event.type === "response.reasoning_summary_text.delta") told += event.delta;
    }
    check(told);
  },
  "encrypted reasoning": async () => {
    const keep = { store: false, include: ["reasoning.encrypted_content"] };
    const { output } = await thinking.responses.create({ ...thought, ...keep });
    check(output[0].encrypted_content, output);
    const input = [{ role: "user", content: "hello" }, { ...output[0], content: undefined }, { role: "user", content: "b" }];
    check((await thinking.responses.create({ ...thought, ...keep, input })).output[0].encrypted_content);
  },
  records: async () => {
    // Its own helper for zod makes no schemas of records.
    const format = { name: "point", schema: z.toJSONSchema(point), strict: true };
    const whole = await client.chat.completions.create({
      model: MODEL, messages, max_tokens: 200, response_format: { type: "json_schema", json_schema: format },
    });
    point.parse(JSON.parse(whole.choices[0].message.content));
    const response = await client.responses.create({
      model: MODEL, input: "where", max_output_tokens: 200, text: { format: { type: "json_schema", ...format } },
    });
    point.parse(JSON.parse(response.output_text));
  },
  "call of a tool that was not offered": async () => {
    const history = [...messages];
    for (let turn = 0; turn < 2; turn++) {
      const tools = [{ type: "function", function: { name: "person", parameters: SCHEMA } }];
      const [choice] = (await calling.chat.completions.create({ model: CALLING_MODEL, messages: history, tools })).choices;
      check(choice.finish_reason === "tool_calls" && choice.message.tool_calls[0].function.name === "nobody", choice);
      const id = choice.message.tool_calls[0].id;
      history.push(choice.message, { role: "tool", tool_call_id: id, content: "There is no such tool." });
    }
  },
  "history of the provider's own tools": async () => {
    const asked = { role: "user", content: "Who?" };
    const input = [
      asked,
      { type: "web_search_call", id: "ws_1", status: "completed", action: { type: "search", query: "somebody" } },
      { type: "mcp_call", id: "mcp_1", name: "find", server_label: "people", arguments: "{}", output: "somebody" },
      { type: "shell_call", id: "sh_1", call_id: "c", status: "completed", action: { commands: ["ls"] } },
      { type: "shell_call_output", call_id: "c", output: [{ stdout: "a", stderr: "", outcome: { type: "exit", exit_code: 0 } }] },
      asked,
    ];
    check((await client.responses.create({ model: MODEL, input, max_output_tokens: 8, store: false })).output_text);
  },
  compaction: async () => {
    const compacted = await client.responses.compact({ model: MODEL, input: messages, max_output_tokens: 16 });
    check(compacted.output.map((item) => item.type).join() === "message,compaction", compacted);
    const input = [...compacted.output, ...messages];
    check((await client.responses.create({ model: MODEL, input, max_output_tokens: 8 })).output_text);
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
  images: () => look({ url: `data:image/png;base64,${PICTURE}`, detail: "high" }),
  "images in Responses": () => answer({ image_url: `data:image/png;base64,${PICTURE}` }),
  "images of files": async () => {
    const file = await seeing.files.create({
      file: await toFile(Buffer.from(PICTURE, "base64"), "a.png"), purpose: "vision",
    });
    await look({ file_id: file.id });
    await answer({ file_id: file.id });
    await seeing.files.delete(file.id);
  },
  "streamed images": async () => {
    const content = [{ type: "input_image", detail: "auto", image_url: `data:image/png;base64,${PICTURE}` }, { type: "input_text", text: "Look" }];
    let end;
    const ask = { model: SEEING_MODEL, input: [{ role: "user", content }], max_output_tokens: 4, stream: true };
    for await (const event of await seeing.responses.create(ask)) end = event;
    check(end.response.usage.input_tokens === NUM_SEEN, end);
  },
  truncation: async () => {
    const context = (await client.models.retrieve(MODEL)).max_model_len;
    const turn = { role: "user", content: "one two three four ".repeat(Math.floor(context / 40)) };
    const ask = { model: MODEL, input: Array(12).fill(turn), truncation: "auto", max_output_tokens: 4 };
    const refusal = await client.responses.create({ ...ask, truncation: "disabled" }).then(() => ({}), (error) => error);
    check(refusal.code === "context_length_exceeded" && refusal.param === "input", refusal);
    const { usage } = await client.responses.create(ask);
    check(usage.input_tokens > context / 2 && usage.input_tokens < context, usage);
    const end = await client.responses.stream(ask).finalResponse();
    check(end.usage.input_tokens === usage.input_tokens, end.usage);
  },
});
