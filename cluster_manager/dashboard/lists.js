// Search, filters, order and pages of long lists. All of them stand in the hash of the address: `#vms?q=web&state=running`.

import { el, plural } from "./dom.js";
import { isDeflated, lacks, state } from "./state.js";

const ORDERS = {
  id: (a, b) => (a.id < b.id ? -1 : 1),
  name: (a, b) => (a.name < b.name ? -1 : 1),
  host: (a, b) => (a.host || "").localeCompare(b.host || ""),
  state: (a, b) => a.state.localeCompare(b.state),
  "CPU lacking": (a, b) => lacks(b, "cpu_cores") - lacks(a, "cpu_cores"),
  "memory lacking": (a, b) => lacks(b, "memory_mib") - lacks(a, "memory_mib"),
};

/** Whether a text has all words that are searched for. */
export function searched(query) {
  const words = (query.q || "").toLowerCase().split(/\s+/).filter(Boolean);
  return (text) => words.every((word) => text.toLowerCase().includes(word));
}

let kept = { key: "", rows: [] };
/** The rows that are asked for, in order, or as they are where `sort` is null; and which of them are on the page. */
export function paged(items, query, size) {
  // With the first and the last, since the VMs of two hosts may be as many.
  const ends = [items.at(0), items.at(-1)].map((item) => item?.words);
  const key = JSON.stringify([state.version, items.length, ends, { ...query, page: "" }]);
  if (kept.key !== key || items.length < 500) {
    const has = searched(query);
    const rows = items.filter(
      (item) =>
        has(item.words) &&
        ["state", "priority", "mode"].every((name) => !query[name] || item[name] === query[name]) &&
        (query.only !== "deflated" || isDeflated(item)),
    );
    if (query.sort !== null) rows.sort(ORDERS[query.sort] || ORDERS.name);
    kept = { key, rows };
  }
  return pageOf(kept.rows, items.length, query, size);
}

/** Of the rows that are asked for, those on the page. */
export function pageOf(rows, all, query, size) {
  const pages = Math.max(Math.ceil(rows.length / size), 1),
    page = Math.min(Math.max(Number(query.page) || 1, 1), pages);
  return { rows: rows.slice((page - 1) * size, page * size), page, pages, found: rows.length, all };
}

export function pager(shown, word) {
  const said = `${shown.found === shown.all ? plural(shown.all, "row") : `${shown.found} of ${shown.all} rows`} of ${word}, page ${shown.page} of ${shown.pages}`;
  const turn = (to, text, off) =>
    el("button", { type: "button", "data-do": "page", "data-page": to, disabled: off }, text);
  if (shown.pages === 1) return el("p", { class: "pager" }, shown.found === shown.all ? null : said);
  return el(
    "nav",
    { class: "pager", "aria-label": `Pages of ${word}` },
    turn(shown.page - 1, "Previous", shown.page === 1),
    el("span", { role: "status" }, said),
    turn(shown.page + 1, "Next", shown.page === shown.pages),
  );
}

/** Have the fields show what the list follows: one that was used once minds its attributes no more. */
export function settle(root) {
  for (const field of root.querySelectorAll("[data-query]")) {
    const chosen = field.options ? field.querySelector("[selected]") || field.options[0] : field,
      value = chosen.getAttribute("value");
    if (field.value !== value) field.value = value;
  }
}

/** A filter by what no row has, of an old bookmark, is one of the choices too. */
const offered = (name, values, now) => (name === "sort" || !now || values.includes(now) ? values : [...values, now]);

/** A search field and selects: `[name in the query, label, values]`. */
export function filters(query, selects, ...more) {
  return el(
    "div",
    { class: "filters", role: "search" },
    el(
      "label",
      null,
      "Search ",
      el("input", {
        type: "search",
        "data-query": "q",
        value: query.q || "",
        "aria-keyshortcuts": "/",
        placeholder: "words of a row",
      }),
    ),
    selects.map(([name, label, values]) =>
      el(
        "label",
        { "data-key": name },
        `${label} `,
        el(
          "select",
          { "data-query": name },
          name !== "sort" && el("option", { value: "" }, "any"),
          offered(name, values, query[name]).map((value) =>
            el("option", { value, selected: query[name] === value }, value),
          ),
        ),
      ),
    ),
    more,
  );
}
