// Builds elements. Text is always set as text: nothing that a server or a person sends is ever read as HTML.

export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined).map(asNode));
  return element;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

// heads: [title, isNumber] of each column. rows: cells that are texts, numbers or elements.
export function table(heads, rows, caption) {
  const head = el("tr", {}, heads.map(([title, isNumber]) => el("th", { class: isNumber === true ? "num" : null, scope: "col" }, title)));
  const body = rows.map((cells) =>
    el("tr", {}, cells.map((cell, place) => {
      const kind = heads[place][1] === "wrap" ? "wrap" : heads[place][1] ? "num" : null;
      return el("td", { class: kind }, cell ?? "");
    })));
  const empty = el("tr", {}, el("td", { colspan: heads.length, class: "dim" }, "nothing"));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", {}, el("thead", {}, head), el("tbody", {}, body.length ? body : empty)));
}

export function card(title, value) {
  return el("div", { class: "card" }, el("b", {}, value), el("span", {}, title));
}

export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(1)} ms`;
  return value < 120 ? `${value.toFixed(2)} s` : `${(value / 60).toFixed(1)} min`;
}

export function number(value, digits = 0) {
  return Number(value ?? 0).toLocaleString("en", { maximumFractionDigits: digits });
}

export function spark(values) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(space, "polyline");
  const most = Math.max(1, ...values);
  line.setAttribute("points", values.map((value, place) =>
    `${(100 * place) / Math.max(1, values.length - 1)},${29 - (28 * value) / most}`).join(" "));
  line.setAttribute("vector-effect", "non-scaling-stroke");
  svg.append(line);
  return svg;
}
