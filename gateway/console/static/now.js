// Live view: the counters of two polls give rates.

import { ask } from "./api.js";
import { card, el, number, seconds, spark, table } from "./dom.js";

const EVERY_MS = 2000;
const LOOKS = 60;

export function show(root, _argument, tell) {
  let before = null;
  let isShown = true;
  let timer = 0;
  const speeds = [];
  const place = el("div");
  root.append(el("h1", {}, "Now"), place);

  async function look() {
    if (!isShown) return;
    try {
      if (!document.hidden) {
        const told = await ask("now");
        if (!isShown) return;
        const passed = before ? Math.max(0.001, told.at - before.at) : 0;
        if (!before || passed > 0.5) {
          if (before) speeds.push(sum(told.workers, (each) => rate(each, before.workers, "worker", "generation_tokens", passed)));
          if (speeds.length > LOOKS) speeds.shift();
          place.replaceChildren(...draw(told, before ?? told, passed, speeds));
          before = told;
        }
        tell(null);
      }
    } catch (error) {
      tell(error);
    }
    if (isShown) timer = setTimeout(look, EVERY_MS);
  }

  look();
  return () => {
    isShown = false;
    clearTimeout(timer);
  };
}

function sum(list, read) {
  return list.reduce((total, each) => total + read(each), 0);
}

function rate(each, earlier, name, counter, passed) {
  const last = earlier.find((other) => other[name] === each[name] && other.started === each.started);
  return last && passed ? Math.max(0, each[counter] - last[counter]) / passed : 0;
}

function total(counts) {
  return Object.values(counts).reduce((all, count) => all + count, 0);
}

function draw(told, before, passed, speeds) {
  const speed = (each, counter) => rate(each, before.workers, "worker", counter, passed);
  // Rates are unknown on the first look.
  const known = (text) => (passed ? text : "");
  const cards = el("div", { class: "cards" },
    card("tokens/s", known(number(speeds.at(-1)))),
    card("sequences running", number(sum(told.workers, (each) => each.running))),
    card("requests waiting", number(sum(told.queues, (each) => each.waiting))),
    card("open answers", number(sum(told.gateways, (each) => each.streams))),
    card("refused: no capacity", number(sum(told.gateways, (each) => total(each.shed)))),
    card("moved to another worker", number(sum(told.gateways, (each) => total(each.moves)))));
  const workers = told.workers.map((each) => [
    each.worker, each.model, `${each.running}/${each.max_num_seqs}`, number(each.waiting),
    `${number(100 * (1 - each.free_blocks / Math.max(1, each.total_blocks)))}%`,
    known(number(speed(each, "generation_tokens"))), known(number(speed(each, "prefill_tokens"))),
    known(`${number(Math.min(100, 100 * speed(each, "busy_s")))}%`), number(each.preemptions),
    each.gpus.map((gpu) => gpu.power_watts === null ? "" : `${number(gpu.power_watts)} W`).join(" "),
    state(each),
  ]);
  const queues = told.queues.map((each) => [each.model, each.lane, number(each.waiting), seconds(each.oldest_s)]);
  const gateways = told.gateways.map((each) => [
    each.gateway, number(each.streams), reasons(each.shed), reasons(each.limited), reasons(each.moves),
    known(number(rate(each, before.gateways, "gateway", "completion_tokens", passed))),
    known(`${number(100 * rate(each, before.gateways, "gateway", "cpu_s", passed))}%`),
  ]);
  const hosted = told.hosts.flatMap((host) => host.models.map((each) => [
    each.name, host.host, each.state, number(each.num_ready) + (each.num_withheld ? `, ${number(each.num_withheld)} of them cordoned` : ""), each.on_demand ? "on demand" : "always",
    each.ready_in_s ? seconds(each.ready_in_s) : "", number(each.wakes),
    each.need_bytes ? `${(each.need_bytes / 1e9).toFixed(2)} GB` : "", each.error ?? "",
  ]));
  const hidden = told.num_workers - told.workers.length;
  return [
    cards,
    el("section", {}, el("h2", {}, "Tokens a second"), spark(speeds)),
    el("section", {}, el("h2", {}, "Workers"), table([
      ["worker"], ["model"], ["running", true], ["waiting", true], ["KV used", true], ["tokens/s", true],
      ["prefill/s", true], ["busy", true], ["preempted", true], ["power", true], ["state"],
    ], workers, "Workers"), hidden > 0 ? el("p", { class: "dim" }, `and ${hidden} more`) : null),
    el("section", {}, el("h2", {}, "Queues"),
      table([["model"], ["lane"], ["waiting", true], ["oldest", true]], queues, "Queues")),
    ...(hosted.length ? [el("section", {}, el("h2", {}, "Models of hosts"), table([
      ["model"], ["host"], ["state"], ["workers", true], ["mode"], ["ready in", true], ["wakes", true],
      ["memory", true], ["error", "wrap"],
    ], hosted, "Models of hosts"))] : []),
    el("section", {}, el("h2", {}, "Gateways"), table([
      ["gateway"], ["answers", true], ["refused"], ["over limits"], ["moved"], ["tokens/s", true], ["CPU", true],
    ], gateways, "Gateways")),
  ];
}

function state(each) {
  const told = each.role === null ? [] : [`role ${each.role}`];
  if (each.golden?.problem) told.push(`${each.golden.has_withdrawn ? "withdrawn" : "goes on"}: ${each.golden.problem}`);
  else if (each.draining) told.push(each.is_ending ? "draining, then ends" : "cordoned");
  return el("span", { class: each.golden?.problem ? "bad" : null }, told.join("; "));
}

function reasons(counts) {
  return Object.entries(counts).filter(([, count]) => count).map(([name, count]) => `${name} ${number(count)}`).join(", ") || "0";
}
