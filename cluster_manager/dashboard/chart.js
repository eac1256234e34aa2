// History of a host or VM: nominal, bound, resident; what each layer keeps away; pressure; and marks where something
// happened, which stand in a list beside the charts, too. uPlot draws; a table has the same figures.

/* global uPlot */
import { ask, now } from "./api.js";
import { el, iso, number, table } from "./dom.js";
import { eventList } from "./events.js";

export const RANGES = { "1h": 3600, "6h": 21600, "1d": 86400, "7d": 604800 };
const POINTS = 240,
  AGAIN_MS = 20_000,
  HEIGHT = 190;

// [column, name, colour variable, dash]: lines differ in their dashes, areas in their hatching, not in colour alone.
const SIZES = [
  ["nominal", "nominal", "--ink", []],
  ["bound", "bound", "--used", [8, 4]],
  ["resident", "resident", "--ok", [2, 3]],
  ["minimum", "minimum", "--quiet", [1, 5]],
];
const LAYERS = [
  ["hypervisor", "hypervisor", "--used", 1],
  ["guest", "guest", "--deflated", 2],
  ["application", "made possible by the application", "--ok", 3],
];
const PRESSURE = [
  ["cpu_pressure_percent", "CPU", "--used", []],
  ["cpu_pressure_max_percent", "CPU, highest", "--used", [2, 3]],
  ["memory_pressure_percent", "memory", "--deflated", [8, 4]],
  ["memory_pressure_max_percent", "memory, highest", "--deflated", [1, 5]],
];

let shown = null;

/** Read the history if it is another one, or has grown old; true: there is something new to draw. */
export async function readHistory(kind, name, range) {
  const key = `${kind}/${name}/${range}`;
  if (shown && shown.key === key && Date.now() - shown.read < AGAIN_MS) return;
  const to = await now(),
    from = to - RANGES[range];
  const history = await ask(
    `/v1/${kind}s/${encodeURIComponent(name)}/history?from=${from}&to=${to}&points=${POINTS}`,
    true,
  );
  shown = { key, history, read: Date.now(), from, to };
}
export const historyOf = (kind, name, range) =>
  shown && shown.key === `${kind}/${name}/${range}` ? shown.history : undefined;
export const markList = (history) =>
  eventList(
    history.marks
      .map((mark) => ({ id: mark.event_id, at: mark.time, kind: mark.kind, sentence: mark.sentence }))
      .reverse(),
    "Nothing happened in this time.",
  );

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A pattern of its own for each layer: lines to the right, to the left, and dots. */
function hatch(name, kind) {
  const tile = document.createElement("canvas"),
    size = 8;
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.globalAlpha = 0.35;
  pen.fillStyle = colour(name);
  pen.fillRect(0, 0, size, size);
  pen.globalAlpha = 1;
  pen.strokeStyle = pen.fillStyle;
  pen.lineWidth = 1.5;
  pen.beginPath();
  if (kind === 3) {
    pen.arc(4, 4, 1.6, 0, 7);
    pen.fill();
    return pen.createPattern(tile, "repeat");
  }
  for (const at of [-size, 0, size]) {
    if (kind === 1) {
      pen.moveTo(at, 0);
      pen.lineTo(at + size, size);
    } else {
      pen.moveTo(at + size, 0);
      pen.lineTo(at, size);
    }
  }
  pen.stroke();
  return pen.createPattern(tile, "repeat");
}

/** Each layer's upper edge: the layers below it are added. The guest's includes what the application made possible. */
export function stacked(columns, resource) {
  const [hypervisor, guest, application] = ["hypervisor", "guest", "application"].map(
    (name) => columns[`${name}_${resource}`],
  );
  const add = (...values) =>
    values.some((value) => value === null || value === undefined)
      ? null
      : values.reduce((sum, value) => sum + value, 0);
  const least = (...values) => (values.includes(null) ? null : Math.min(...values));
  const possible = application.map((value, at) => least(value, guest[at]));
  return [hypervisor.map((value, at) => add(value, guest[at])), guest, possible];
}

function draw(root, title, said, times, series, data, unit, marks, range) {
  const axis = {
    stroke: colour("--quiet"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line") },
  };
  const place = el("div", { role: "img", "aria-label": said });
  root.append(el("h3", null, title), place);
  const chart = new uPlot(
    {
      width: Math.max(root.clientWidth, 260),
      height: HEIGHT,
      cursor: { sync: { key: "history" }, drag: { x: true, y: false } },
      scales: {
        x: { min: range[0], max: range[1] },
        y: { range: (_, low, high) => [0, (high > 0 ? high : 1) * 1.08] },
      },
      axes: [
        {
          ...axis,
          values: (self, splits) => splits.map((at) => iso(at).slice(range[1] - range[0] > 90_000 ? 5 : 11, 16)),
        },
        { ...axis, size: 62, values: (_, splits) => splits.map((value) => number(value)) },
      ],
      series: [
        { label: "time", value: (_, at) => (at ? iso(at) : "–") },
        ...series.map((one) => ({
          width: 2,
          points: { show: false },
          value: (_, value) => (value === null || value === undefined ? "–" : `${number(value)} ${unit}`),
          ...one,
        })),
      ],
      hooks: {
        draw: [
          (self) => {
            const pen = self.ctx;
            pen.save();
            pen.strokeStyle = pen.fillStyle = colour("--bad");
            pen.setLineDash([3, 3]);
            for (const mark of marks) {
              const x = self.valToPos(mark.time, "x", true);
              if (x < self.bbox.left || x > self.bbox.left + self.bbox.width) continue;
              pen.beginPath();
              pen.moveTo(x, self.bbox.top);
              pen.lineTo(x, self.bbox.top + self.bbox.height);
              pen.stroke();
              pen.beginPath();
              pen.moveTo(x - 4, self.bbox.top);
              pen.lineTo(x + 4, self.bbox.top);
              pen.lineTo(x, self.bbox.top + 7);
              pen.fill();
            }
            pen.restore();
          },
        ],
      },
    },
    [times, ...data],
    place,
  );
  return chart;
}

let charts = [],
  watch = null,
  drawn = "";

/** Put the charts into their place, if they are not there as they should be. */
export function mount(root, theme) {
  if (!root || !shown || !shown.history || root.dataset.key !== shown.key) return;
  const key = `${shown.key}/${shown.read}/${theme}`;
  if (drawn === key && root.childNodes.length) return;
  drawn = key;
  unmount();
  root.replaceChildren();
  const { columns, times, marks } = shown.history,
    range = [shown.from, shown.to];
  if (!times.length) {
    root.append(el("p", { class: "none" }, "Nothing is known of this time yet."));
    return;
  }
  const newest = (name) => number(columns[name][columns[name].length - 1]);
  for (const [resource, word, unit] of [
    ["cpu_cores", "CPU", "cores"],
    ["memory_mib", "Memory", "MiB"],
  ]) {
    const sizes = SIZES.filter(([name]) => columns[`${name}_${resource}`]);
    if (columns[`capacity_${resource}`]) sizes.unshift(["capacity", "capacity", "--bad", [12, 3]]);
    const pair = el("div", { class: "chart" }),
      layers = el("div", { class: "chart" });
    root.append(pair, layers);
    charts.push(
      draw(
        pair,
        `${word}: sold, bound, used (${unit})`,
        `${word}: ${sizes.map(([name, said]) => `${said} ${newest(`${name}_${resource}`)}`).join(", ")} ${unit} now`,
        times,
        sizes.map(([, label, stroke, dash]) => ({ label, stroke: colour(stroke), dash })),
        sizes.map(([name]) => columns[`${name}_${resource}`]),
        unit,
        marks,
        range,
      ),
    );
    charts.push(
      draw(
        layers,
        `${word}: kept away by the layers (${unit})`,
        `${word} kept away: ${LAYERS.map(([name, said]) => `${said} ${newest(`${name}_${resource}`)}`).join(", ")} ${unit} now`,
        times,
        LAYERS.map(([, label, stroke, kind]) => ({
          label: label === "guest" || label === "hypervisor" ? `${label} (upper edge)` : label,
          stroke: colour(stroke),
          fill: hatch(stroke, kind),
          width: 1.5,
        })),
        stacked(columns, resource),
        unit,
        marks,
        range,
      ),
    );
  }
  const pressure = el("div", { class: "chart" });
  root.append(pressure);
  charts.push(
    draw(
      pressure,
      "Pressure (% of the time)",
      `Pressure: CPU ${newest("cpu_pressure_percent")} %, memory ${newest("memory_pressure_percent")} % now`,
      times,
      PRESSURE.map(([, label, stroke, dash]) => ({ label, stroke: colour(stroke), dash })),
      PRESSURE.map(([name]) => columns[name]),
      "%",
      marks,
      range,
    ),
  );
  root.append(figures(times, columns));
  watch = new ResizeObserver(() => {
    for (const chart of charts) {
      const width = chart.root.parentNode.clientWidth;
      if (width && Math.abs(width - chart.width) > 2) chart.setSize({ width, height: HEIGHT });
    }
  });
  watch.observe(root);
}

export function unmount() {
  if (watch) watch.disconnect();
  for (const chart of charts) chart.destroy();
  charts = [];
  watch = null;
}

export function forget() {
  unmount();
  shown = null;
}

const LATEST = 60;
function figures(times, columns) {
  const names = Object.keys(columns).filter((name) => columns[name].some((value) => value !== null));
  const details = el("details", null, el("summary", null, `The latest ${LATEST} figures as a table`));
  details.addEventListener("toggle", () => {
    if (!details.open || details.childNodes.length > 1) return;
    const rows = times
      .map((at, index) => [at, [iso(at), ...names.map((name) => number(columns[name][index]))]])
      .slice(-LATEST)
      .reverse();
    const heads = ["time", ...names.map((name) => name.replaceAll("_", " "))];
    details.append(table("Figures", heads, rows, "", true));
  });
  return details;
}
