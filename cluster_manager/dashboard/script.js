"use strict";
// Everything that comes from the cluster is set as text, never as markup. The token lives in this closure only.
(() => {
  const RESOURCES = [["cpu_cores", "CPU", "cores"], ["memory_mib", "memory", "MiB"],
    ["disk_mib_s", "disk", "MiB/s"], ["network_mib_s", "network", "MiB/s"]];
  const MOST_ROWS = 500, MOST_EVENTS = 100, LOOK_MS = 5000, NEWS_MS = 300, AGAIN_MS = 2000;
  const WORDS = { paused: "is paused: no VM is created and no size is changed until it is resumed",
    draining: "is draining: it takes no new VM", off: "is off: what was taken is given back, then its VMs are left alone" };
  const byId = (id) => document.getElementById(id);
  let token = "", session = null, chosen = "", lastEvent = 0, soon = 0;

  function make(tag, text, name, children) {
    const made = document.createElement(tag);
    if (text !== undefined && text !== null) made.textContent = text;
    if (name) made.className = name;
    for (const child of children || []) made.append(child);
    return made;
  }
  const number = (value) => Number(value.toFixed(value < 10 ? 2 : 0)).toString();
  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

  function bar(parts, most, marks, label) {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("class", "bar");
    svg.setAttribute("viewBox", "0 0 1000 10");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", label);
    const share = (value) => (most > 0 ? Math.min(Math.max(value / most, 0), 1) * 1000 : 0);
    let x = 0;
    for (const [value, name] of [[most, ""], ...parts]) {
      const rect = document.createElementNS(space, "rect");
      rect.setAttribute("x", name ? x : 0);
      rect.setAttribute("width", Math.min(share(value), name ? 1000 - x : 1000));
      rect.setAttribute("height", 10);
      if (name) { rect.setAttribute("class", name); x = Math.min(x + share(value), 1000); }
      svg.append(rect);
    }
    for (const mark of marks) {
      const line = document.createElementNS(space, "line");
      for (const [key, value] of [["x1", share(mark)], ["x2", share(mark)], ["y1", 0], ["y2", 10]]) {
        line.setAttribute(key, value);
      }
      svg.append(line);
    }
    return svg;
  }

  const isOff = (vm) => ["placing", "stopped", "preempted"].includes(vm.state);
  const lacks = (vm, name) => (isOff(vm) ? 0 : Math.max(vm.nominal[name] - vm.current[name], 0));

  function showHosts(hosts, vms) {
    byId("hosts").replaceChildren(...hosts.map((host) => {
      const mine = vms.filter((vm) => vm.host === host.id);
      const card = make("div", null, host.state === "ready" ? "host" : "host silent");
      const state = host.state === "silent" ? `silent since ${clock(host.seen_at)}` : `${host.state} ${host.state_reason}`;
      const what = host.state === "ready" ? `${mine.length} VM${mine.length === 1 ? "" : "s"}` : state;
      card.append(make("h3", null, "", [make("span", host.id), make("span", `${host.mode} · ${what}`)]));
      for (const [name, word, unit] of RESOURCES) {
        const capacity = host.capacity[name];
        if (!(capacity > 0)) continue;
        const used = Math.max(capacity - host.free[name], 0);
        const taken = mine.reduce((sum, vm) => sum + lacks(vm, name), 0);
        const said = `${number(used)} of ${number(capacity)} ${unit} held, ${number(taken)} taken from VMs, `
          + `${number(host.deflatable[name])} still deflatable`;
        card.append(make("div", null, "figure", [make("span", word), make("span", said)]));
        card.append(bar([[used, "used"]], capacity, [], `${host.id} ${word}: ${said}`));
        if (taken > 0) card.append(bar([[taken, "deflated"]], capacity, [], `${host.id} ${word}: taken from VMs`));
      }
      return card;
    }));
    if (!hosts.length) byId("hosts").append(make("p", "No host has reported yet.", "none"));
    byId("modes").replaceChildren(...hosts.filter((host) => host.mode !== "active").map((host) => {
      const because = host.mode_reason ? ` (${host.mode_reason})` : "";
      return make("p", `${host.id} ${WORDS[host.mode] || `is ${host.mode}`}${because}`, "mode");
    }));
  }

  function sizeCell(vm, name, unit) {
    const cell = make("td", null, "size"), most = (vm.ceiling || vm.nominal)[name];
    if (!(most > 0)) return cell;
    const off = vm.state === "placing" ? "not yet" : "off";
    const said = isOff(vm) ? off : `${number(vm.current[name])} of ${number(vm.nominal[name])} ${unit}`;
    cell.append(make("span", said));
    const parts = [[vm.current[name], "used"], [lacks(vm, name), "deflated"]];
    cell.append(bar(parts, most, [vm.minimum[name]], `${vm.name}: ${said}, minimum ${number(vm.minimum[name])}`));
    return cell;
  }

  function table(id, heads, rows, none) {
    const head = make("thead", null, "", [make("tr", null, "", heads.map((text) => make("th", text)))]);
    // On a narrow screen each row stands by itself, its cells with their heads beside them.
    for (const row of rows) heads.forEach((text, at) => { row.cells[at].dataset.head = text; });
    const full = make("table", null, "", [head, make("tbody", null, "", rows)]);
    byId(id).className = "table";
    byId(id).replaceChildren(rows.length ? full : make("p", none, "none"));
  }

  function showVMs(vms) {
    const rows = vms.map((vm) => {
      const name = make("button", vm.name);
      name.type = "button";
      name.addEventListener("click", () => { chosen = vm.name; explain().catch(told); });
      const sold = vm.guest_connected || isOff(vm) ? vm.priority : `${vm.priority}, guest silent`;
      return make("tr", null, "", [make("td", null, "", [name]), make("td", vm.host || "–"),
        make("td", vm.state + (vm.saved_mib == null ? "" : " (suspended)")
          + (vm.preempted ? `, ${vm.preempted.sentence}` : ""), "state"),
        make("td", sold), sizeCell(vm, "cpu_cores", "cores"), sizeCell(vm, "memory_mib", "MiB"),
        make("td", vm.sentence)]);
    });
    table("vms", ["VM", "host", "state", "sold as", "CPU", "memory", "last"], rows, "There are no VMs.");
  }

  function showOperations(operations) {
    const rows = operations.map((one) => make("tr", null, "", [make("td", clock(one.started_at)), make("td", one.kind),
      make("td", one.vm || "–"), make("td", one.host || "–"),
      make("td", one.progress.length ? one.progress[one.progress.length - 1] : one.sentence)]));
    table("operations", ["since", "what", "VM", "host", "so far"], rows, "Nothing is under way.");
  }

  async function explain() {
    if (!chosen) return;
    const found = await ask(`/v1/vms/${encodeURIComponent(chosen)}/explain`, true);
    byId("why").hidden = found === null;
    if (found === null) { chosen = ""; return; }
    const inner = found.explanation, last = inner && inner.resizes[inner.resizes.length - 1];
    byId("why-name").textContent = `${chosen}: layers of its last resize`;
    byId("why-sentence").textContent = inner ? inner.sentence : found.unreachable || found.sentence;
    const rows = (last ? last.outcome.ledger : []).map((row) => make("tr", null, "", [make("td", row.layer),
      make("td", row.resource), make("td", number(row.asked)), make("td", number(row.promised)),
      make("td", number(row.verified)), make("td", `${number(row.seconds)} s`), make("td", row.reason)]));
    table("why-layers", ["layer", "resource", "asked", "promised", "verified", "took", "reason"], rows,
      "Its host remembers no resize.");
  }

  function showEvent(event) {
    lastEvent = Math.max(lastEvent, event.id);
    const about = [event.vm, event.host].filter((name) => name && !event.sentence.includes(name)).join(" on ");
    const time = make("time", clock(event.at));
    byId("events").prepend(make("li", null, "", [time, make("strong", event.kind), ` ${about ? about + ": " : ""}${event.sentence}`]));
    while (byId("events").children.length > MOST_EVENTS) byId("events").lastChild.remove();
  }

  class Refused extends Error {}

  async function send(path, signal) {
    const headers = { Authorization: `Bearer ${token}` };
    return fetch(path, { headers, signal, cache: "no-store", credentials: "omit", redirect: "error" });
  }

  async function ask(path, mayMiss) {
    if (!session) throw new DOMException("the token was forgotten", "AbortError");
    const answer = await send(path, session.signal);
    if (answer.status === 404 && mayMiss) return null;
    if (!answer.ok) throw await problem(answer);
    return answer.json();
  }

  async function problem(answer) {
    const said = await answer.json().then((body) => body.detail, () => answer.statusText);
    if (answer.status === 401 || answer.status === 403) return new Refused(said);
    return new Error(`${answer.status}: ${said}`);
  }

  function told(error) {
    if (error.name === "AbortError") return;
    byId("problem").textContent = String(error.message || error);
    byId("problem").hidden = false;
    if (error instanceof Refused) leave();
  }

  async function look() {
    const limit = `limit=${MOST_ROWS}`;
    const [hosts, vms, operations] = await Promise.all([ask(`/v1/hosts?${limit}`), ask(`/v1/vms?${limit}`),
      ask("/v1/operations?state=running&limit=100")]);
    showHosts(hosts.hosts, vms.vms);
    showVMs(vms.vms);
    showOperations(operations.operations);
    await explain();
    const more = hosts.next || vms.next ? `; the first ${MOST_ROWS} of each are shown` : "";
    byId("summary").textContent = `${hosts.hosts.length} hosts, ${vms.vms.length} VMs at ${clock(Date.now() / 1000)}${more}`;
    byId("problem").hidden = true;
  }

  async function looking(mine) {
    while (mine === session) {
      await look().catch(told);
      await new Promise((resolve) => { const timer = setTimeout(resolve, LOOK_MS); soon = () => { clearTimeout(timer);
        setTimeout(resolve, NEWS_MS); }; });
    }
  }

  async function listening(mine) {
    const page = await ask(`/v1/events?limit=${MOST_EVENTS}`).catch((error) => { told(error); return { events: [] }; });
    for (const event of page.events.slice().reverse()) showEvent(event);
    while (mine === session) {
      await follow(mine).catch(told);
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  async function follow(mine) {
    const answer = await send(`/v1/events/stream?since_id=${lastEvent}`, mine.signal);
    if (!answer.ok) throw await problem(answer);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ;) {
      const { value, done } = await reader.read();
      if (done || mine !== session) return;
      const blocks = (text + value).split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) { showEvent(JSON.parse(data.join("\n"))); if (soon) soon(); }
      }
    }
  }

  function leave() {
    if (session) session.controller.abort();
    session = null; token = ""; chosen = ""; lastEvent = 0;
    for (const id of ["hosts", "modes", "vms", "operations", "events", "why-layers"]) byId(id).replaceChildren();
    byId("summary").textContent = "";
    byId("cluster").hidden = byId("leave").hidden = byId("why").hidden = true;
    byId("enter").hidden = false;
  }

  byId("leave").addEventListener("click", leave);
  byId("enter").addEventListener("submit", (event) => {
    event.preventDefault();
    token = byId("token").value.trim();
    byId("token").value = "";
    const controller = new AbortController();
    const mine = session = { controller, signal: controller.signal };
    byId("problem").hidden = byId("enter").hidden = true;
    byId("cluster").hidden = byId("leave").hidden = false;
    looking(mine).catch(told);
    listening(mine).catch(told);
  });
})();
