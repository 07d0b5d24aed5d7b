// Which view is shown follows from the address: #now, #request/ID, #playground, #tenants, #dead, #aliases.

import { el } from "./dom.js";
import * as aliases from "./aliases.js";
import * as dead from "./dead.js";
import * as now from "./now.js";
import * as playground from "./playground.js";
import * as request from "./request.js";
import * as tenants from "./tenants.js";

const VIEWS = { now, request, playground, tenants, dead, aliases };
const KEYS = Object.keys(VIEWS);
const main = document.getElementById("view");
const notice = document.getElementById("notice");
let leave = () => {};

function tell(error) {
  notice.textContent = error ? error.message : "";
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    // A stray "%": the address was typed, and stands for itself.
    return text;
  }
}

async function show() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const view = name ? VIEWS[name] : now;
  leave();
  tell(null);
  for (const link of document.querySelectorAll("nav a")) {
    const isCurrent = link.hash === `#${name || "now"}`;
    if (isCurrent) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const root = el("div");
  main.replaceChildren(root);
  if (!Object.hasOwn(VIEWS, name || "now")) {
    leave = () => {};
    root.append(el("p", {}, `There is no page #${decoded(name)}.`));
    return;
  }
  leave = view.show(root, decoded(rest.join("/")), tell) ?? (() => {});
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("headrace-theme", theme);
}

const wished = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
setTheme(localStorage.getItem("headrace-theme") ?? wished);
document.getElementById("theme").addEventListener("click", () =>
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));

addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  const place = Number(event.key) - 1;
  if (KEYS[place]) location.hash = KEYS[place];
  if (event.key === "/") {
    event.preventDefault();
    location.hash = "request";
    requestAnimationFrame(() => document.getElementById("request-id")?.focus());
  }
});
document.querySelector(".skip").addEventListener("click", (event) => {
  // Its address would be that of another view.
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", show);
addEventListener("unhandledrejection", (event) => tell(event.reason));
show();
