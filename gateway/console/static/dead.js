// Requests in quarantine, the newest first.

import { ask } from "./api.js";
import { el, number, table } from "./dom.js";

export function show(root, _argument, tell) {
  root.append(el("h1", {}, "Dead letters"));
  load(root).catch(tell);
}

async function load(root) {
  const told = await ask("dead-letters");
  const rows = told.letters.map((each) => [
    number(each.seq), new Date(each.quarantined * 1000).toLocaleString([], { timeZoneName: "short" }), each.tenant, each.model, each.lane, each.reason,
    each.request_id ? el("a", { href: `#request/${encodeURIComponent(each.request_id)}` }, each.id) : each.id,
    each.error, each.attempts.map((attempt) => `${attempt.worker || "no worker"}: ${attempt.error}`).join("; "), each.prompt ?? "",
  ]);
  root.append(el("section", {},
    el("p", { class: "dim" }, `${number(told.total)} in all. headrace dead retries and drops them.`),
    table([["number", true], ["given up"], ["tenant"], ["model"], ["lane"], ["reason"], ["request"], ["error", "wrap"],
      ["attempts", "wrap"], ["prompt", "wrap"]], rows, "Dead letters")));
}
