// Use, limits and keys of tenants; a key is shown when it is made, and later by its name alone.

import { ask } from "./api.js";
import { el, number, table } from "./dom.js";

export function show(root, _argument, tell) {
  const tables = el("div");
  let asked = 0;
  const load = async () => {
    const turn = ++asked;
    // Dim until what has changed is in it; an answer that comes after that of a later question says less.
    tables.setAttribute("aria-busy", "true");
    try {
      const told = await ask("tenants");
      if (turn === asked) fill(tables, told, revoke);
    } catch (error) {
      if (turn === asked) tell(error);
    }
    if (turn === asked) tables.removeAttribute("aria-busy");
  };
  async function revoke(key) {
    if (!confirm(`Revoke ${key.name || key.id} of ${key.tenant}? Its holders are refused within seconds.`)) return;
    try {
      await ask(`keys/${encodeURIComponent(key.id)}/revoke`, {});
      tell(null);
      load();
    } catch (error) {
      tell(error);
    }
  }
  root.append(el("h1", {}, "Tenants"), maker(tell, load), tables);
  load();
}

function maker(tell, made) {
  const field = (attributes) => el("input", { autocomplete: "off", ...attributes });
  const fields = {
    tenant: field({ id: "key-tenant", required: true, maxlength: 128 }), name: field({ id: "key-name", maxlength: 128 }),
    models: field({ id: "key-models", placeholder: "all" }),
    requests_per_minute: field({ type: "number", min: 1, placeholder: "none" }),
    tokens_per_minute: field({ type: "number", min: 1, placeholder: "none" }),
    max_concurrent: field({ type: "number", min: 1, placeholder: "none" }),
    expires_days: field({ type: "number", min: 1, max: 3650, placeholder: "never" }),
  };
  const titles = ["Tenant", "Name", "Models, by commas", "Requests/min", "Tokens/min", "At once", "Ends in days"];
  const place = el("p", { id: "key-made", role: "status" });
  const form = el("form", { class: "bar-form" },
    Object.values(fields).map((input, index) => el("label", {}, titles[index], input)), el("button", { type: "submit" }, "Make a key"));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const body = {};
    for (const [name, input] of Object.entries(fields)) {
      if (input.value.trim()) body[name] = input.type === "number" ? Number(input.value) : input.value.trim();
    }
    if (body.models) body.models = body.models.split(",").map((each) => each.trim()).filter(Boolean);
    try {
      const { id, key } = await ask("keys", body);
      place.replaceChildren("This key is shown only now: ", el("code", { id: "made-key" }, key), ` (${id})`);
      form.reset();
      tell(null);
      made();
    } catch (error) {
      tell(error);
    }
  });
  return el("section", {}, el("h2", {}, "A new key"), form, place);
}

function fill(root, told, revoke) {
  const use = told.use.map((each) => {
    const tokens = (each.prompt_tokens ?? 0) + (each.completion_tokens ?? 0);
    return [each.tenant, each.model, each.lane, number(each.requests), number(each.prompt_tokens), number(each.cached_tokens),
      number(each.completion_tokens), number((each.device_us ?? 0) / 1e6, 1), each.energy_mj === undefined ? "" : number(each.energy_mj / 1e3),
      each.cost === null ? "" : each.cost.toFixed(4), each.cost && tokens ? ((1e6 * each.cost) / tokens).toFixed(4) : ""];
  });
  const limit = (value) => (value === null || value === undefined ? "none" : number(value));
  const limits = told.limits.map((each) => [each.tenant, limit(each.requests_per_minute), limit(each.tokens_per_minute), limit(each.max_concurrent)]);
  const day = (value) => (value ? new Date(value * 1000).toISOString().slice(0, 10) : "");
  const keys = told.keys.map((each) => [each.id, each.name, each.tenant, each.models.join(", "), limit(each.requests_per_minute),
    limit(each.tokens_per_minute), limit(each.max_concurrent), day(each.created), each.revoked ? `revoked ${day(each.revoked)}` : day(each.expires),
    each.revoked ? "" : el("button", { type: "button", onclick: () => revoke(each) }, "Revoke")]);
  const perMinute = [["requests/min", true], ["tokens/min", true], ["at once", true]];
  root.replaceChildren(
    el("section", {}, el("h2", {}, "Use since the system was set up"), table([
      ["tenant"], ["model"], ["lane"], ["requests", true], ["prompt", true], ["cached", true], ["generated", true],
      ["device s", true], ["energy J", true], ["cost", true], ["per million tokens", true],
    ], use, "Use")),
    el("section", {}, el("h2", {}, "Limits of tenants"), table([["tenant"], ...perMinute], limits, "Limits")),
    el("section", {}, el("h2", {}, "Keys"),
      table([["id"], ["name"], ["tenant"], ["models"], ...perMinute, ["made"], ["ends"], [""]], keys, "Keys"),
      el("p", { class: "dim" }, "headrace keys changes and replaces them, too.")));
}
