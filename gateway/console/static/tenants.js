// Use, limits and keys of tenants; keys are shown by name, never by content.

import { ask } from "./api.js";
import { el, number, table } from "./dom.js";

export function show(root, _argument, tell) {
  root.append(el("h1", {}, "Tenants"));
  load(root).catch(tell);
}

async function load(root) {
  const told = await ask("tenants");
  const use = told.use.map((each) => {
    const tokens = (each.prompt_tokens ?? 0) + (each.completion_tokens ?? 0);
    return [each.tenant, each.model, each.lane, number(each.requests), number(each.prompt_tokens), number(each.cached_tokens),
      number(each.completion_tokens), number((each.device_us ?? 0) / 1e6, 1), number((each.energy_mj ?? 0) / 1e3),
      each.cost === null ? "" : each.cost.toFixed(4), each.cost && tokens ? ((1e6 * each.cost) / tokens).toFixed(4) : ""];
  });
  const limit = (value) => (value === null || value === undefined ? "none" : number(value));
  const limits = told.limits.map((each) => [each.tenant, limit(each.requests_per_minute), limit(each.tokens_per_minute), limit(each.max_concurrent)]);
  const day = (value) => (value ? new Date(value * 1000).toISOString().slice(0, 10) : "");
  const keys = told.keys.map((each) => [each.id, each.name, each.tenant, each.models.join(", "), limit(each.requests_per_minute),
    limit(each.tokens_per_minute), limit(each.max_concurrent), day(each.created), each.revoked ? `revoked ${day(each.revoked)}` : day(each.expires)]);
  const perMinute = [["requests/min", true], ["tokens/min", true], ["at once", true]];
  root.append(
    el("section", {}, el("h2", {}, "Use since the system was set up"), table([
      ["tenant"], ["model"], ["lane"], ["requests", true], ["prompt", true], ["cached", true], ["generated", true],
      ["device s", true], ["energy J", true], ["cost", true], ["per million tokens", true],
    ], use, "Use")),
    el("section", {}, el("h2", {}, "Limits of tenants"), table([["tenant"], ...perMinute], limits, "Limits")),
    el("section", {}, el("h2", {}, "Keys"),
      table([["id"], ["name"], ["tenant"], ["models"], ...perMinute, ["made"], ["ends"]], keys, "Keys"),
      el("p", { class: "dim" }, "headrace keys makes, limits and revokes them.")));
}
