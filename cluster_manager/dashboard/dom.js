// Elements from values: all that comes from the cluster is set as text. A view makes its whole tree anew, and `morph`
// changes in the page only what differs, so that focus, selection, scrolling and what is typed stay.

const SVG = "http://www.w3.org/2000/svg",
  SVG_TAGS = new Set(["svg", "rect", "line", "path", "circle", "text", "g", "title"]);

/** An element; attributes that are null, undefined or false are left out. */
export function el(tag, attributes, ...children) {
  const made = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const keyOf = (node) => (node.nodeType === 1 ? node.getAttribute("data-key") : null);
const alike = (one, other) =>
  one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

/** Bring an element's children to those of another one. What has `data-own` looks after its own content. */
export function morph(old, made) {
  const keyed = new Map(),
    wanted = new Set([...made.childNodes].map(keyOf));
  for (const child of [...old.childNodes]) {
    const key = keyOf(child);
    if (key === null) continue;
    if (wanted.has(key)) keyed.set(key, child);
    else child.remove(); // first, or all that follow would be moved, and what is moved loses the focus
  }
  let at = old.firstChild;
  for (const child of [...made.childNodes]) {
    const key = keyOf(child),
      known = key === null ? null : keyed.get(key);
    if (known && known !== at && alike(known, child)) old.insertBefore(known, at);
    const present = known && alike(known, child) ? known : at;
    if (present && present.parentNode === old && alike(present, child)) {
      if (present.nodeType === 1) {
        attributes(present, child);
        if (!present.hasAttribute("data-own")) morph(present, child);
      } else if (present.nodeValue !== child.nodeValue) present.nodeValue = child.nodeValue;
      at = present.nextSibling;
    } else old.insertBefore(child, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function attributes(old, made) {
  for (const { name } of [...old.attributes]) {
    if (!made.hasAttribute(name) && name !== "open" && !(old.hasAttribute("data-own") && name !== "class"))
      old.removeAttribute(name);
  }
  for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
}

export const RESOURCES = [
  ["cpu_cores", "CPU", "cores"],
  ["memory_mib", "memory", "MiB"],
  ["disk_mib_s", "disk", "MiB/s"],
  ["network_mib_s", "network", "MiB/s"],
];

export const number = (value) =>
  value === null || value === undefined
    ? "–"
    : Number(value.toFixed(Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0)).toString();
export const share = (value) => (value === null || value === undefined ? "unknown" : `${number(value * 100)} %`);
export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** A vector in words: "2 cores, 1024 MiB". */
export function size(vector, say = number) {
  const parts = RESOURCES.filter(([name]) => vector && vector[name] > 0).map(
    ([name, , unit]) => `${say(vector[name])} ${unit}`,
  );
  return parts.join(", ") || "nothing";
}

const pad = (value) => String(value).padStart(2, "0");
/** A moment in ISO form with its date, in the viewer's time zone. */
export function iso(seconds) {
  const at = new Date(seconds * 1000);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}
export const time = (seconds) =>
  seconds ? el("time", { datetime: new Date(seconds * 1000).toISOString() }, iso(seconds)) : "–";
export function lasting(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${number(seconds)} s`;
  if (seconds < 5400) return `${number(seconds / 60)} min`;
  return seconds < 172800 ? `${number(seconds / 3600)} h` : `${number(seconds / 86400)} days`;
}

/** Parts of a whole, one after the other, with marks; `label` says the same in words. */
export function bar(parts, most, label, marks = []) {
  const part = (value) => (most > 0 ? Math.min(Math.max(value / most, 0), 1) * 100 : 0);
  let x = 0;
  const rects = parts.map(([value, name]) => {
    const rect = el("rect", { x: `${x}%`, width: `${Math.min(part(value), 100 - x)}%`, height: "100%", class: name });
    x = Math.min(x + part(value), 100);
    return rect;
  });
  return el(
    "svg",
    { class: "bar", role: "img", "aria-label": label },
    el("rect", { width: "100%", height: "100%", class: "free" }),
    rects,
    marks.map((mark) => el("line", { x1: `${part(mark)}%`, x2: `${part(mark)}%`, y1: 0, y2: "100%" })),
  );
}

/** A table whose rows stand by themselves on a narrow screen, or which is scrolled there. Rows: `[key, cells]`. */
export function table(caption, heads, rows, none, wide = false) {
  if (!rows.length) return el("p", { class: "none" }, none);
  return el(
    "div",
    { class: "table", role: "region", "aria-label": caption, tabindex: 0 },
    el(
      "table",
      { class: wide && "wide" },
      el("caption", null, caption),
      el(
        "thead",
        null,
        el(
          "tr",
          null,
          heads.map((text) => el("th", { scope: "col" }, text)),
        ),
      ),
      el(
        "tbody",
        null,
        rows.map(([key, cells]) =>
          el(
            "tr",
            { "data-key": key },
            cells.map((cell, at) =>
              el(at ? "td" : "th", { "data-head": heads[at], scope: at ? null : "row" }, el("div", null, cell)),
            ),
          ),
        ),
      ),
    ),
  );
}

export const link = (to, text, more) => el("a", { href: to, ...more }, text);
export const button = (text, what, more) => el("button", { type: "button", "data-do": what, ...more }, text);
export const definitions = (pairs) =>
  el(
    "dl",
    null,
    pairs
      .filter(([, value]) => value !== null && value !== "")
      .map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))),
  );
