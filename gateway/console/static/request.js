// One request's life as bars, and lists of requests to find it in.

import { ask } from "./api.js";
import { el, number, seconds, table } from "./dom.js";

const ORDERS = [
  ["running", "running"], ["recent", "latest ended"], ["slow", "slowest"], ["first", "latest first token"],
  ["failed", "not answered"],
];
const KINDS = [
  ["gateway", "admission"], ["queue", "in the queue"], ["prefix", "waits for its prefix"], ["read", "read"],
  ["wait", "waits"], ["prefill", "prefill"], ["decode", "decode"], ["preempted", "preempted"], ["worker", "with a worker"],
];

export function show(root, id, tell) {
  const field = el("input", { id: "request-id", value: id, size: 36, spellcheck: "false", autocomplete: "off" });
  const find = (event) => {
    event.preventDefault();
    location.hash = `request/${encodeURIComponent(field.value.trim())}`;
  };
  const place = el("div");
  root.append(el("h1", {}, "Requests"),
    el("form", { class: "bar-form", onsubmit: find },
      el("label", {}, "x-request-id", field), el("button", { type: "submit" }, "Find"),
      ORDERS.map(([order, title]) => el("button", { type: "button", "data-order": order, onclick: () => list(order) }, title))),
    place);

  async function list(order) {
    try {
      const { requests } = await ask(`requests?order=${order}`);
      place.replaceChildren(el("section", {}, listed(requests)));
      tell(null);
    } catch (error) {
      tell(error);
    }
  }

  async function one() {
    try {
      const { requests } = await ask(`requests/${encodeURIComponent(id)}`);
      place.replaceChildren(...requests.map(life));
      tell(null);
    } catch (error) {
      place.replaceChildren(el("p", {}, error.message));
    }
  }

  if (id) one();
  else list("recent");
}

function listed(requests) {
  const rows = requests.map((each) => [
    el("a", { href: `#request/${encodeURIComponent(each.id)}` }, each.id),
    new Date(each.began * 1000).toLocaleTimeString([], { timeZoneName: "short" }), each.tenant, each.model, each.route,
    el("span", { class: each.status >= 400 ? "bad" : null }, `${each.status || ""} ${each.outcome} ${each.code ?? ""}`),
    seconds(each.first_token_s), seconds(each.ended_s), number(each.tokens ?? 0), number(each.moves ?? 0),
  ]);
  return table([
    ["request"], ["came"], ["tenant"], ["model"], ["route"], ["end"], ["first token", true], ["total", true], ["tokens", true],
    ["moves", true],
  ], rows, "Requests");
}

function life(view) {
  const told = view.timeline;
  const ended = Math.max(told.ended_s ?? 0, ...view.rows.flatMap((row) => row.bars.map((bar) => bar.end_s)), 1e-6);
  const detail = el("p", { class: "detail", role: "status" }, "Point at a bar, or reach it with Tab.");
  const explain = (bar) => () => {
    detail.textContent = `${bar.text}: ${seconds(bar.begin_s)} to ${seconds(bar.end_s)}, ${seconds(bar.end_s - bar.begin_s)}`;
  };
  const rows = view.rows.map((row) => {
    const bars = row.bars.map((bar) => {
      const tell = explain(bar);
      const element = el("button", {
        type: "button", class: `bar ${bar.kind}`, "aria-label": `${bar.text}, ${seconds(bar.end_s - bar.begin_s)}`,
        onmouseenter: tell, onfocus: tell, onclick: tell,
      });
      element.style.left = `min(${(100 * bar.begin_s) / ended}%, 100% - 4px)`;
      element.style.width = `${(100 * Math.max(0, bar.end_s - bar.begin_s)) / ended}%`;
      return element;
    });
    return el("div", { class: row.is_retry ? "track-row retry" : "track-row" },
      el("div", { class: "label", title: row.label }, row.label), el("div", { class: "track" }, bars));
  });
  const axis = el("div", { class: "track-row" }, el("div"), el("div", { class: "axis" },
    [0, 0.25, 0.5, 0.75, 1].map((part) => el("span", {}, part ? seconds(part * ended) : "0"))));
  const legend = el("div", { class: "legend" },
    KINDS.map(([kind, title]) => el("span", {}, el("i", { class: `bar ${kind}` }), title)));
  const facts = [told.id, told.model, told.tenant && `tenant ${told.tenant}`, told.gateway, `${told.status || ""} ${told.outcome ?? "running"}`];
  return el("section", { class: "life" },
    el("h2", {}, facts.filter(Boolean).join(" · ")),
    told.error ? el("p", { class: "bad" }, told.error) : null,
    told.prompt ? el("pre", { class: "prompt" }, told.prompt) : null,
    rows, axis, detail, legend,
    el("h2", {}, "What happened"),
    table([["at", true], ["", "wrap"]], view.events.map((event) => [seconds(event.at_s), event.text]), "Events"),
    el("h2", {}, "Receipt"), receipt(view.receipt),
    view.curl ? again(view) : null);
}

function receipt(bill) {
  const ms = (value) => `${number(value, 1)} ms`;
  const rows = [["device time", ms(bill.device_ms)], ["prefill", ms(bill.prefill_ms)], ["decode", ms(bill.decode_ms)]];
  if (bill.rejected_ms) rows.push(["drafts that were rejected", ms(bill.rejected_ms)]);
  if (bill.recomputed_ms) rows.push(["computed again after a preemption", ms(bill.recomputed_ms)]);
  if (bill.retries_ms) rows.push(["attempts that were lost", ms(bill.retries_ms)]);
  rows.push(["prompt tokens", number(bill.prompt_tokens)], ["of them cached", number(bill.cached_tokens)],
    ["generated tokens", number(bill.completion_tokens)]);
  if (bill.drafted_tokens) rows.push(["drafts accepted", `${number(bill.accepted_tokens)} of ${number(bill.drafted_tokens)}`]);
  if (bill.energy_j !== null) rows.push(["energy", `${number(bill.energy_j, 1)} J`]);
  if (bill.cost !== null) rows.push(["cost", bill.cost.toPrecision(3)]);
  if (!bill.is_complete) rows.push(["incomplete", "a worker died or did not tell"]);
  return table([["", false], ["", true]], rows, "Receipt");
}

function again(view) {
  const text = view.curl;
  const { model, route, prompt, asked, stop, not_kept: lacks = [] } = view.timeline;
  const replay = el("button", { type: "button", id: "replay" }, "Ask again in the playground");
  replay.addEventListener("click", () => {
    sessionStorage.setItem("headrace-replay", JSON.stringify({ model, route, prompt, asked, stop, lacks }));
    location.hash = "playground";
  });
  const button = el("button", { type: "button" }, "Copy as curl");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  });
  const note = lacks.length ? el("p", { id: "not-kept" }, `Not the same in all: of ${lacks.join(", ")} not everything is kept.`) : null;
  return el("div", {}, el("h2", {}, "Ask again"), el("pre", { class: "curl" }, text), note, button, " ", replay);
}
