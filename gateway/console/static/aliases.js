// Names that stand for models, and canaries beside the models they may replace; an operator ends a canary here.

import { askPort } from "./api.js";
import { el, number, seconds, table } from "./dom.js";

const EVERY_MS = 2000;

export function show(root, _argument, tell) {
  const tables = el("div");
  root.append(el("h1", {}, "Aliases and canaries"), tables);
  let isOpen = true, timer = null, drawn = "";
  async function load() {
    clearTimeout(timer);
    try {
      const [{ aliases }, { canaries }] = await Promise.all([askPort("v1/aliases"), askPort("v1/canaries")]);
      const told = JSON.stringify([aliases, canaries]);
      // Redrawn only after a change, so that a button keeps the focus.
      if (isOpen && told !== drawn) tables.replaceChildren(...sections(aliases, canaries, end));
      drawn = told;
    } catch (error) {
      tell(error);
    }
    clearTimeout(timer);
    if (isOpen) timer = setTimeout(load, EVERY_MS);
  }
  async function end(canary, action) {
    const [stable, tried] = canary.arms;
    const [order, winner] = action === "promote" ? ["Promote", tried.model] : ["Roll back", stable.model];
    const asked = `${order} the canary ${tried.model} of ${nameOf(canary)}? All its requests go to ${winner} then.`;
    if (!confirm(`${asked} Requests that run end where they began.`)) return;
    try {
      await askPort("v1/canaries/change", { alias: canary.alias, tenant: canary.tenant, action });
      tell(null);
    } catch (error) {
      tell(error);
    }
    await load();
  }
  load();
  return () => {
    isOpen = false;
    clearTimeout(timer);
  };
}

function nameOf(canary) {
  return canary.tenant === null ? canary.alias : `${canary.alias} of tenant ${canary.tenant}`;
}

function sections(aliases, canaries, end) {
  const rows = aliases.map((each) => [
    each.name, each.tenant ?? "all", each.model, each.canary ? `${number(each.canary.percent, 2)}% to ${each.canary.model}` : "",
    each.is_hidden ? "hidden by a model of this name" : each.is_served ? "" : "not served",
  ]);
  return [
    el("section", {}, el("h2", {}, "Aliases"),
      table([["alias"], ["tenant"], ["model"], ["canary"], ["state"]], rows, "Aliases"),
      el("p", { class: "dim" }, "headrace alias sets and removes them, headrace canary starts and changes canaries.")),
    ...canaries.map((each) => canarySection(each, end)),
  ];
}

function canarySection(canary, end) {
  const isRunning = canary.state === "running";
  const state = isRunning ? `${number(canary.percent, 2)}% of conversations` : canary.state.replace("_", " ");
  const arms = canary.arms.map((arm) => [
    arm.arm, arm.model, number(arm.requests),
    arm.requests ? `${number(arm.errors)} (${number((100 * arm.errors) / arm.requests, 2)}%)` : number(arm.errors),
    seconds(arm.ttft_p50_s), seconds(arm.ttft_p99_s), seconds(arm.itl_p50_s), seconds(arm.itl_p99_s),
    arm.mean_logprob === null ? "" : `${arm.mean_logprob.toFixed(3)} of ${number(arm.logprobs)}`,
  ]);
  const button = (action, text) => el("button", { type: "button", onclick: () => end(canary, action) }, text);
  return el("section", { class: "canary" },
    el("h2", {}, `Canary of ${nameOf(canary)}: ${state}`),
    table([["arm"], ["model"], ["requests", true], ["failed", true], ["first token p50", true], ["p99", true],
      ["next token p50", true], ["p99", true], ["mean log probability", true]], arms, `Canary of ${nameOf(canary)}`),
    el("p", { class: canary.state === "rolled_back" ? "bad" : "dim" }, canary.verdict),
    isRunning ? el("p", {}, button("rollback", "Roll back"), " ", button("promote", "Promote")) : null);
}
