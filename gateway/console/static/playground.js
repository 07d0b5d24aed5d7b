// A chat with a model, or a completion: live tokens a second, the probability of each token, tools, images, and the
// answer as JSON.

import { refusal } from "./api.js";
import { el, number, seconds } from "./dom.js";

const STORED = "headrace-api-key";
const REPLAY = "headrace-replay";
const EXAMPLE_TOOLS = JSON.stringify([{ type: "function", function: { name: "get_weather",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 1);

export function show(root, _argument, tell) {
  const key = el("input", { type: "password", autocomplete: "off", value: sessionStorage.getItem(STORED) ?? "", id: "api-key" });
  const model = el("select", { id: "model", "aria-label": "Model" });
  const route = el("select", { id: "route" }, el("option", { value: "chat" }, "chat"), el("option", { value: "completion" }, "completion"));
  const temperature = el("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0.7 });
  const most = el("input", { type: "number", min: 1, value: 200, id: "max-tokens" });
  const shows = el("input", { type: "checkbox", checked: true });
  const json = el("input", { type: "checkbox" });
  const tools = el("textarea", { id: "tools", spellcheck: "false", placeholder: EXAMPLE_TOOLS, "aria-label": "Tools" });
  const more = el("textarea", { id: "more", spellcheck: "false", placeholder: '{"seed": 7, "stop": ["."]}', "aria-label": "More parameters" });
  const images = el("input", { type: "file", id: "images", multiple: true, accept: "image/png,image/jpeg,image/webp,image/gif", "aria-label": "Images" });
  const message = el("textarea", { id: "message", placeholder: "Say something. Ctrl+Enter sends.", "aria-label": "Message" });
  const send = el("button", { type: "submit" }, "Send");
  const stop = el("button", { type: "button", disabled: true }, "Stop");
  const clear = el("button", { type: "button" }, "Clear");
  const log = el("div", { "aria-live": "off", id: "chat" });
  const speed = el("p", { class: "dim", role: "status", id: "speed" });
  const raw = el("pre", { id: "raw" });
  const turns = [];
  let running = null;

  const headers = () => ({ Authorization: `Bearer ${key.value.trim()}`, "Content-Type": "application/json" });

  async function models() {
    sessionStorage.setItem(STORED, key.value.trim());
    if (!key.value.trim()) return;
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw await refusal(response);
    const names = (await response.json()).data.map((each) => each.id);
    model.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(replayed?.model)) model.value = replayed.model;
    tell(null);
  }

  async function chat(event) {
    event?.preventDefault();
    if (running || !(message.value || images.files.length)) return;
    if (!key.value.trim()) {
      tell(new Error("An API key is needed here, with --no-auth too: headrace up prints one."));
      key.focus();
      return;
    }
    const text = message.value;
    // A copy: the field's own list is emptied with the field.
    const shown = copied(images.files);
    try {
      turns.push({ role: "user", content: await content(text, shown) });
    } catch (error) {
      tell(error);
      return;
    }
    const asked = el("div", { class: "turn user" }, text, [...shown].map((file) => el("div", { class: "dim" }, file.name)));
    log.append(asked);
    message.value = images.value = "";
    const answer = el("div", { class: "turn assistant" });
    log.append(answer);
    running = new AbortController();
    stop.disabled = false;
    send.disabled = true;
    try {
      turns.push(...await stream(answer));
      tell(null);
    } catch (error) {
      if (error.name !== "AbortError") tell(error);
      if (answer.textContent) turns.push({ role: "assistant", content: answer.textContent });
      else {
        turns.pop();
        asked.remove();
        answer.remove();
        message.value ||= text;
        if (!images.files.length) images.files = shown;
      }
    } finally {
      running = null;
      stop.disabled = true;
      send.disabled = false;
    }
  }

  async function stream(answer) {
    const isChat = route.value === "chat";
    const body = {
      model: model.value, stream: true, stream_options: { include_usage: true },
      temperature: temperature.value ? Number(temperature.value) : undefined,
      max_tokens: most.value ? Number(most.value) : undefined,
    };
    Object.assign(body, isChat ? { messages: turns } : { prompt: turns.at(-1).content });
    if (shows.checked) Object.assign(body, isChat ? { logprobs: true, top_logprobs: 3 } : { logprobs: 3 });
    if (tools.value.trim()) body.tools = parsed(tools.value, "Tools");
    if (json.checked) body.response_format = { type: "json_object" };
    if (more.value.trim()) Object.assign(body, parsed(more.value, "More parameters"));
    const began = performance.now();
    const response = await fetch(isChat ? "v1/chat/completions" : "v1/completions",
      { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) throw await refusal(response);
    const id = response.headers.get("x-request-id");
    let first = 0;
    let tokens = 0;
    let text = "";
    let last = {};
    const calls = [];
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      last = { ...last, ...chunk, choices: choice ? [choice] : last.choices };
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      for (const part of choice?.delta?.tool_calls ?? []) add(calls, part, answer);
      const probable = choice?.logprobs?.content ?? completionTokens(choice?.logprobs);
      if (!piece && !probable.length) continue;
      first ||= performance.now();
      tokens += probable.length || 1;
      text += piece;
      answer.append(...(probable.length ? probable.map(token) : [piece]));
      const passed = (performance.now() - first) / 1000;
      const pace = tokens > 1 && passed > 0 ? `${number((tokens - 1) / passed, 1)} tokens/s · ` : "";
      speed.replaceChildren(`${pace}${tokens} tokens · first after ${seconds((first - began) / 1000)} · `,
        id ? el("a", { href: `#request/${encodeURIComponent(id)}` }, "timeline") : "");
    }
    raw.textContent = JSON.stringify({ "x-request-id": id, request: body, last }, null, 2);
    if (!calls.length) return [{ role: "assistant", content: text }];
    const waiting = calls.map(({ id: callId }) => ({ role: "tool", tool_call_id: callId, content: "(not run in the playground)" }));
    return [{ role: "assistant", content: text || null, tool_calls: calls.map(({ shown, ...call }) => call) }, ...waiting];
  }

  const replayed = JSON.parse(sessionStorage.getItem(REPLAY) ?? "null");
  if (replayed) {
    sessionStorage.removeItem(REPLAY);
    message.value = replayed.prompt ?? "";
    // The playground streams one answer, and asks for probabilities by itself.
    const { temperature: warmth, max_tokens: length, stream: _, n, logprobs, top_logprobs: __, ...others } = replayed.asked ?? {};
    route.value = replayed.route;
    temperature.value = warmth ?? "";
    most.value = length ?? "";
    shows.checked = logprobs !== undefined;
    if (replayed.stop) others.stop = replayed.stop;
    const lacks = [...replayed.lacks, ...(n > 1 ? ["n"] : [])];
    if (others.seed !== undefined && !Number.isSafeInteger(others.seed)) {
      delete others.seed;
      lacks.push("seed");
    }
    delete others.best_of;
    if (!others.priority) delete others.priority;
    if (Object.keys(others).length) more.value = JSON.stringify(others);
    if (!replayed.prompt) tell(new Error("The prompt is hidden (gateways show it with --log-prompts): type it again."));
    else if (lacks.length) tell(new Error(`Not the same in all: ${lacks.join(", ")} cannot be taken over in full.`));
  }
  const form = el("form", { onsubmit: chat }, message, el("label", { class: "dim" }, "Images ", images),
    el("details", {}, el("summary", {}, "Tools"), tools),
    el("details", { open: Boolean(more.value) }, el("summary", {}, "More parameters"), more), el("div", { class: "bar-form" }, send, stop, clear));
  stop.addEventListener("click", () => running?.abort());
  clear.addEventListener("click", () => {
    turns.length = 0;
    log.replaceChildren();
    speed.replaceChildren();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) chat(event);
  });
  key.addEventListener("change", () => models().catch(tell));
  root.append(el("h1", {}, "Playground"),
    el("div", { class: "bar-form" },
      el("label", {}, "API key", key), el("label", {}, "Model", model), el("label", {}, "API", route),
      el("label", {}, "Temperature", temperature),
      el("label", {}, "Most tokens", most), el("label", { class: "check" }, shows, "probabilities"),
      el("label", { class: "check" }, json, "JSON")),
    el("section", {}, log, speed, form), el("details", {}, el("summary", {}, "JSON"), raw));
  models().catch(tell);
  return () => running?.abort();
}

// A turn's content: its text, or the text and images as data URLs.
async function content(text, files) {
  const urls = await Promise.all([...files].map((file) => new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  })));
  const parts = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return parts.length ? [...(text ? [{ type: "text", text }] : []), ...parts] : text;
}

function copied(files) {
  const copies = new DataTransfer();
  for (const file of files) copies.items.add(file);
  return copies.files;
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

// The tokens of a completion in the form of a chat's.
function completionTokens(told) {
  return (told?.tokens ?? []).map((each, index) => ({
    token: each, logprob: told.token_logprobs[index],
    top_logprobs: Object.entries(told.top_logprobs?.[index] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
}

// Append a piece of a tool call to the answer's calls, and show the call.
function add(calls, part, answer) {
  let call = calls[part.index];
  if (!call) {
    call = calls[part.index] = { id: part.id, type: "function", function: { name: "", arguments: "" }, shown: el("pre", { class: "call" }) };
    answer.append(call.shown);
  }
  call.function.name += part.function?.name ?? "";
  call.function.arguments += part.function?.arguments ?? "";
  call.shown.textContent = `${call.function.name}(${call.function.arguments})`;
}

function token(each) {
  const probability = Math.exp(each.logprob);
  const step = probability < 0.1 ? 0 : probability < 0.4 ? 1 : probability < 0.8 ? 2 : 3;
  const others = (each.top_logprobs ?? []).map((other) => `${JSON.stringify(other.token)} ${(100 * Math.exp(other.logprob)).toFixed(1)}%`);
  return el("span", { class: `token p${step}`, title: `${(100 * probability).toFixed(1)}% — ${others.join(", ")}` }, each.token);
}

async function* events(stream) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = stream.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
