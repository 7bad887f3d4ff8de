"use strict";
const byId = (id) => document.getElementById(id);
const { runs, owners } = JSON.parse(byId("data").textContent);
const GUTTER = 96, RIGHT = 16, AXIS = 26, HEAD = 30, LANE = 24, BAR = 18, MEMORY = 92, MIN_SPAN = 50, NUM_OWNERS = 9;
const COMPUTE = 0, HIDDEN = 1, EXPOSED = 2, STALL = 3, CLASSES = ["compute", "hidden", "exposed", "exposed"];
const canvas = byId("timeline"), tip = byId("tip");
const end = Math.max(1, ...runs.map((run) => Math.max(run.step, run.bound))) * 1.015;
const view = { from: 0, to: end };
let width = 0, height = 0, hovered = null, selected = null, matches = null, colors = {};

// ---- Layout: each run has a lane of bars for the compute stream and one per group, in the order of time.
function bars(items, kind) {
  let last = 0;
  return { items, kind, last: items.map((item) => (last = Math.max(last, item.end))) };
}
function makeLanes() {
  let y = AXIS;
  for (const run of runs) {
    run.top = y; y += HEAD;
    const { name, start, end, critical } = run.compute;
    const compute = name.map((text, i) => ({ name: text, start: start[i], end: end[i], critical: critical[i] }));
    const stalls = run.collectives.filter((c) => c.exposed > 0).map((c) => ({ start: c.end - c.exposed, end: c.end }));
    stalls.sort((a, b) => a.start - b.start);
    for (const c of run.collectives) {
      c.run = run; c.until = c.waited === null ? c.end : Math.max(c.waited, c.end);
      c.from = c.exposed > 0 ? Math.max(c.start, c.end - c.exposed) : c.end; // start of the exposed part
    }
    run.lanes = [{ label: "compute", y, bars: bars(compute, COMPUTE), stalls: bars(stalls, STALL) }];
    y += 8; // room for arrows
    run.groups.forEach((group, queue) => {
      y += LANE;
      run.lanes.push({ label: group, y, bars: bars(run.collectives.filter((c) => c.queue === queue), HIDDEN) });
    });
    y += LANE; run.bottom = y; y += 8;
  }
  return y;
}
const lanesEnd = makeLanes(), hasMemory = runs.some((run) => run.memory.length);
height = lanesEnd + (hasMemory ? MEMORY + 22 : 0) + 10;

// ---- Numbers as text.
function time(ns, step = end / 10000) {
  const [unit, size] = end >= 1e9 ? ["s", 1e9] : end >= 1e6 ? ["ms", 1e6] : ["us", 1e3];
  const digits = Math.ceil(-Math.log10(Math.max(step, 1e-3) / size));
  return `${(ns / size).toFixed(Math.min(9, Math.max(0, digits)))} ${unit}`;
}
function duration(ns) {
  const [unit, size] = ns >= 1e9 ? ["s", 1e9] : ns >= 1e6 ? ["ms", 1e6] : ["us", 1e3];
  return ns ? `${(ns / size).toPrecision(ns / size >= 100 ? Math.ceil(Math.log10(ns / size + 1)) : 3)} ${unit}` : "0";
}
function size(bytes) {
  if (bytes === null) return "unknown";
  let unit = 0;
  while (bytes >= 1024 && unit < 5) { bytes /= 1024; unit++; }
  return `${unit ? bytes.toPrecision(bytes >= 1000 ? 4 : 3) : bytes} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

// ---- Drawing. Bars out of sight are skipped by a binary search; those thinner than a pixel are added up by column.
const firstAfter = (sorted, value) => {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
};
function paint(context, list, y, tall, from, to, left, wide, labels) {
  const scale = wide / (to - from), bins = [null, null, null, null];
  const piece = (kind, a, b) => {
    const x = Math.max(left, left + (a - from) * scale), stop = Math.min(left + wide, left + (b - from) * scale);
    if (stop - x >= 1.5) {
      context.fillStyle = colors[CLASSES[kind]];
      context.fillRect(x, y, stop - x - (stop - x > 4 && labels ? 1 : 0), tall);
    } else if (b > a) {
      bins[kind] ??= new Float32Array(Math.ceil(wide) + 2);
      bins[kind][Math.floor(x - left)] += Math.max(stop - x, 0.15);
    }
  };
  for (let i = firstAfter(list.last, from); i < list.items.length && list.items[i].start < to; i++) {
    const item = list.items[i], middle = item.from ?? item.end;
    context.globalAlpha = list.kind === STALL ? 0.16 : matches && item.run && !matches.has(item) ? 0.18 : 1;
    piece(list.kind, item.start, middle);
    if (middle < item.end) piece(EXPOSED, middle, item.end);
    if (!labels || (item.end - item.start) * scale < 1) continue;
    const x = Math.max(left, left + (item.start - from) * scale);
    const room = Math.min(left + wide, left + (item.end - from) * scale) - x;
    if (room > 34) label(context, item, x, y + tall / 2 + 0.5, room);
    if (item.critical) {
      context.fillStyle = colors.text;
      context.fillRect(x, y + tall + 1, room, 1.5);
    }
  }
  bins.forEach((columns, kind) => {
    if (!columns) return;
    context.fillStyle = colors[CLASSES[kind]];
    for (let x = 0; x < columns.length; x++) {
      if (!columns[x]) continue;
      context.globalAlpha = (kind === STALL ? 0.16 : 1) * Math.min(1, 0.25 + columns[x] * 0.75);
      context.fillRect(left + x, y, 1, tall);
    }
  });
  context.globalAlpha = 1;
}
function label(context, item, x, y, room) {
  const most = Math.floor((room - 10) / 6.3), name = item.of || item.name;
  context.fillStyle = item.run ? colors["on-bar"] : colors.text;
  context.fillText(name.length > most ? `${name.slice(0, most - 1)}…` : name, x + 5, y);
}
const xOf = (ns) => GUTTER + ((ns - view.from) / (view.to - view.from)) * (width - GUTTER - RIGHT);
const timeAt = (x) => view.from + ((x - GUTTER) / (width - GUTTER - RIGHT)) * (view.to - view.from);

function draw() {
  const began = performance.now(), c = canvas.getContext("2d"), wide = width - GUTTER - RIGHT;
  c.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  c.clearRect(0, 0, width, height);
  c.textBaseline = "middle";
  drawAxis(c);
  for (const run of runs) {
    c.font = "600 13px system-ui, sans-serif"; c.fillStyle = colors.text; c.textAlign = "left";
    c.fillText(run.label, 16, run.top + HEAD / 2 + 3);
    for (const lane of run.lanes) {
      c.font = "11.5px ui-monospace, 'DejaVu Sans Mono', monospace";
      c.fillStyle = colors.muted;
      c.fillText(lane.label.length > 11 ? `${lane.label.slice(0, 10)}…` : lane.label, 16, lane.y + BAR / 2);
      c.fillStyle = colors.soft; c.fillRect(GUTTER, lane.y, wide, BAR);
      c.font = "10.5px ui-monospace, 'DejaVu Sans Mono', monospace";
      if (lane.stalls) paint(c, lane.stalls, lane.y, BAR, view.from, view.to, GUTTER, wide, false);
      paint(c, lane.bars, lane.y, BAR, view.from, view.to, GUTTER, wide, true);
    }
    mark(c, run, run.step, colors.text, [], `step ${time(run.step)}`, false);
    if (run.bound) mark(c, run, run.bound, colors.bound, [5, 4], `bound ${time(run.bound)}`, true);
  }
  if (hasMemory) drawMemory(c, wide);
  for (const item of new Set([selected, hovered])) if (item) drawArrows(c, item);
  const label = `${time(view.from, (view.to - view.from) / 1000)} – ${time(view.to, (view.to - view.from) / 1000)}`;
  if (byId("range").textContent !== label) byId("range").textContent = label;
  byId("window").style.left = `${(view.from / end) * 100}%`;
  byId("window").style.width = `${((view.to - view.from) / end) * 100}%`;
  document.documentElement.dataset.drawMs = performance.now() - began;
  document.documentElement.dataset.firstPaintMs ??= performance.now();
}
function drawAxis(c) {
  const rough = (view.to - view.from) / Math.max(2, (width - GUTTER) / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= rough);
  c.font = "11px system-ui, sans-serif"; c.textAlign = "center";
  for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
    c.fillStyle = colors.line; c.fillRect(xOf(t), AXIS - 6, 1, height - AXIS - 2);
    c.fillStyle = colors.muted; c.fillText(time(t, step), Math.min(xOf(t), width - RIGHT - 12), 11);
  }
}
function mark(c, run, ns, color, dash, text, upper) {
  const x = xOf(ns), room = x + 90 > width;
  if (x < GUTTER || x > width - RIGHT + 1) return;
  c.strokeStyle = c.fillStyle = color; c.lineWidth = 1.5; c.setLineDash(dash);
  c.beginPath(); c.moveTo(x, run.top + (upper ? 3 : 15)); c.lineTo(x, run.bottom); c.stroke(); c.setLineDash([]);
  c.font = "11px system-ui, sans-serif"; c.textAlign = room || upper ? "right" : "left";
  c.fillText(text, x + (room || upper ? -5 : 5), run.top + (upper ? 8 : 20));
}
function drawMemory(c, wide) {
  const top = lanesEnd + 18, peak = Math.max(1, ...runs.map(maximum));
  c.font = "11.5px ui-monospace, 'DejaVu Sans Mono', monospace"; c.textAlign = "left"; c.fillStyle = colors.muted;
  c.fillText("memory", 16, top + 8); c.fillText(size(peak), 16, top + 24);
  c.fillStyle = colors.line; c.fillRect(GUTTER, top + MEMORY, wide, 1);
  runs.forEach((run, i) => {
    const color = i ? colors.memory : colors.muted, stop = Math.min(wide, xOf(run.step) - GUTTER);
    c.fillStyle = color; c.fillText(`— ${run.label}`, 16, top + 46 + 16 * i);
    if (stop <= 0) return;
    const isStacked = i && owners.length && run.memory.length;
    if (isStacked) drawOwners(c, run, stop, top, peak);
    let held = 0, point = 0;
    c.beginPath();
    for (let x = 0; x < stop; x++) { // a column of pixels shows the peak within it
      let most = held;
      for (const until = timeAt(GUTTER + x + 1); point < run.memory.length && run.memory[point][0] < until; point++) {
        held = run.memory[point][1];
        if (run.memory[point][0] >= view.from) most = Math.max(most, held); else most = held;
      }
      const y = top + MEMORY - (most / peak) * (MEMORY - 5);
      c.lineTo(GUTTER + x, y); c.lineTo(GUTTER + Math.min(x + 1, stop), y);
    }
    c.strokeStyle = color; c.lineWidth = i && !isStacked ? 1.75 : 1; c.stroke();
    if (isStacked) return;
    c.lineTo(GUTTER + stop, top + MEMORY); c.lineTo(GUTTER, top + MEMORY);
    c.globalAlpha = 0.1; c.fill(); c.globalAlpha = 1;
  });
}
// One area for each owner, on top of each other; a column of pixels shows the owners at the peak within it.
function drawOwners(c, run, stop, top, peak) {
  const held = run.given.slice();
  let total = run.memory[0][1], point = 1;
  for (let x = 0; x < stop; x++) {
    let largest = total, most = held.slice();
    for (const until = timeAt(GUTTER + x + 1); point < run.memory.length && run.memory[point][0] < until; point++) {
      const change = run.changes[point - 1];
      for (let k = 0; k < change.length; k += 2) held[change[k]] += change[k + 1];
      total = run.memory[point][1];
      if (total >= largest || run.memory[point][0] < view.from) { largest = total; most = held.slice(); }
    }
    let y = top + MEMORY;
    most.forEach((bytes, owner) => {
      const tall = (bytes / peak) * (MEMORY - 5);
      c.fillStyle = colors[`owner-${owner % NUM_OWNERS}`];
      if (tall > 0) c.fillRect(GUTTER + x, y - tall, Math.min(1, stop - x), tall);
      y -= tall;
    });
  }
}
const maximum = (run) => run.memory.reduce((most, [, bytes]) => Math.max(most, bytes), run.peak);
function drawArrows(c, item) {
  if (!item.run) return;
  const y = item.run.lanes[item.queue + 1].y, stream = item.run.lanes[0].y + BAR, x = xOf(item.start);
  c.save(); c.beginPath(); c.rect(GUTTER, 0, width - GUTTER - RIGHT, height); c.clip();
  c.strokeStyle = c.fillStyle = colors.text; c.lineWidth = 1.5;
  c.strokeRect(x, y - 1, Math.max(2, xOf(item.end) - x), BAR + 2);
  const ends = [[item.launched, stream, item.start, y - 2]];
  if (item.waited !== null) ends.push([item.end, y - 2, item.until, stream]);
  for (const [from, y1, to, y2] of ends) {
    const a = xOf(from), b = xOf(to), bend = (y2 - y1) / 2, tipY = y2 - Math.sign(bend) * 6;
    c.beginPath(); c.moveTo(a, y1); c.bezierCurveTo(a, y1 + bend, b, y2 - bend, b, tipY); c.stroke();
    c.beginPath(); c.moveTo(b, y2); c.lineTo(b - 3.5, tipY); c.lineTo(b + 3.5, tipY); c.fill();
  }
  c.restore();
}
let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}
function resize() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["text", "muted", "line", "soft", "compute", "hidden", "exposed", "bound", "memory", "on-bar",
    ...owners.map((_, owner) => `owner-${owner % NUM_OWNERS}`)])
    colors[name] = style.getPropertyValue(`--${name}`).trim();
  const small = byId("overview").firstChild, wide = byId("overview").clientWidth;
  width = canvas.parentElement.clientWidth; canvas.style.height = `${height}px`;
  canvas.width = width * devicePixelRatio; canvas.height = height * devicePixelRatio;
  small.width = wide * devicePixelRatio; small.height = 26 * devicePixelRatio;
  const c = small.getContext("2d");
  c.scale(devicePixelRatio, devicePixelRatio);
  runs.forEach((run, i) => {
    paint(c, run.lanes[0].bars, 3 + 11 * i, 9, 0, end, 0, wide, false);
    paint(c, { ...run.lanes[0].stalls, kind: EXPOSED }, 3 + 11 * i, 9, 0, end, 0, wide, false);
  });
  draw();
}

// ---- Zoom, pan and hover.
function show(from, to) {
  const span = Math.min(end, Math.max(MIN_SPAN, to - from)), start = Math.min(Math.max(0, from), end - span);
  Object.assign(view, { from: start, to: start + span });
  redraw();
}
function zoom(factor, center = (view.from + view.to) / 2) {
  const span = Math.min(end, Math.max(MIN_SPAN, (view.to - view.from) * factor));
  const share = (center - view.from) / (view.to - view.from);
  show(center - span * share, center + span * (1 - share));
}
const pan = (share) => show(view.from + (view.to - view.from) * share, view.to + (view.to - view.from) * share);
function itemAt(x, y) {
  const lane = runs.flatMap((run) => run.lanes).find((each) => y >= each.y - 2 && y < each.y + LANE - 3);
  if (!lane || x < GUTTER || x > width - RIGHT) return null;
  const near = 3 * (timeAt(1) - timeAt(0)), t = timeAt(x), { items, last } = lane.bars;
  const distance = (item) => Math.max(item.start - t, t - item.end, 0);
  let best = null;
  for (let i = firstAfter(last, t - near); i < items.length && items[i].start <= t + near; i++)
    if (!best || distance(items[i]) < distance(best)) best = items[i];
  return best;
}
function make(tag, text = "", name = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className: name });
}
function facts(item) {
  const fact = [["start", time(item.start)], ["end", time(item.end)], ["duration", duration(item.end - item.start)]];
  if (!item.run) return fact;
  const told = item.outcomes.slice(0, 4).map((each) => [each.reason, `${each.pass}: ${each.sentence}`]);
  const group = item.ranks ? `${item.group}, ${item.ranks} ranks` : item.group;
  return [["kind", item.kind || "collective"], ...(item.of ? [["of", item.of]] : []),
    ...(item.phase ? [["phase", item.phase]] : []), ...(item.source ? [["source", item.source]] : []), ["group", group], ["bytes", size(item.bytes)],
    ["launched", time(item.launched)], ...fact, ["waited for", item.waited === null ? "never" : time(item.waited)],
    ["hidden", duration(item.hidden)], ["exposed", duration(item.exposed)],
    ...(item.hiddenBy.length ? [["hidden by", item.hiddenBy.join(", ")]] : []), ...told];
}
function hover(item, x, y) {
  if (item !== hovered) { hovered = item; redraw(); }
  canvas.classList.toggle("over", !!item);
  tip.hidden = !item;
  if (!item) return;
  const list = make("dl");
  for (const [name, value] of facts(item)) list.append(make("dt", name), make("dd", value));
  tip.replaceChildren(make("strong", item.name), list);
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? Math.max(8, y - tip.offsetHeight - 12) : y + 18}px`;
}
let drag = null;
canvas.addEventListener("wheel", (event) => {
  if (event.deltaX && Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / width);
  else if (event.deltaY > 0 && view.to - view.from >= end) return; // fully zoomed out: let the page scroll
  else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.0025))), timeAt(Math.max(GUTTER, event.offsetX)));
  event.preventDefault();
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  if (event.button) return;
  drag = { x: event.clientX, from: view.from, to: view.to, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return hover(itemAt(event.offsetX, event.offsetY), event.clientX, event.clientY);
  drag.moved ||= Math.abs(event.clientX - drag.x) > 3;
  const by = ((drag.x - event.clientX) / (width - GUTTER - RIGHT)) * (drag.to - drag.from);
  if (drag.moved) { canvas.classList.add("dragging"); hover(null); show(drag.from + by, drag.to + by); }
});
canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) choose(itemAt(event.offsetX, event.offsetY));
  drag = null; canvas.classList.remove("dragging");
});
canvas.addEventListener("pointercancel", () => { drag = null; });
canvas.addEventListener("pointerleave", () => hover(null));
canvas.addEventListener("keydown", (event) => {
  const act = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6),
    0: () => show(0, end), Home: () => show(0, end), Escape: () => { choose(null); hover(null); },
  }[event.key];
  if (act && !event.ctrlKey && !event.metaKey) { act(); event.preventDefault(); }
});
function jump(event) {
  if (!event.buttons) return;
  const center = (event.offsetX / byId("overview").clientWidth) * end, half = (view.to - view.from) / 2;
  show(center - half, center + half);
}
byId("overview").addEventListener("pointerdown", jump);
byId("overview").addEventListener("pointermove", jump);
byId("in").addEventListener("click", () => zoom(0.6));
byId("out").addEventListener("click", () => zoom(1 / 0.6));
byId("fit").addEventListener("click", () => show(0, end));

// ---- The table of collectives.
const hasLayers = runs.some((run) => run.collectives.some((c) => c.layer));
const natural = (text) => text.replace(/\d+/g, (digits) => digits.padStart(6, "0"));
const COLUMNS = [["name", (c) => c.name], ["run", (c) => c.run.label],
  hasLayers ? ["layer", (c) => natural(c.layer)] : ["kind", (c) => c.kind],
  ["group", (c) => c.group], ["bytes", (c) => c.bytes ?? -1], ["start", (c) => c.start],
  ["duration", (c) => c.end - c.start], ["hidden", (c) => c.hidden], ["exposed", (c) => c.exposed],
  ["decisions", (c) => c.outcomes.length]];
const LAYER = COLUMNS.findIndex(([name]) => name === "layer");
const FIRST_NUMBER = COLUMNS.findIndex(([name]) => name === "bytes");
const isNumber = (column) => column >= FIRST_NUMBER && column < FIRST_NUMBER + 5;
const everything = runs.flatMap((run) => run.collectives), FEW = 100;
for (const c of everything) {
  const told = c.outcomes.flatMap((outcome) => [outcome.reason, outcome.pass, outcome.sentence]);
  c.words = [c.name, c.of, c.layer, c.phase, c.kind, c.group, ...told].join("\n").toLowerCase();
}
let sorting = { column: FIRST_NUMBER + 4, down: true }, shown = FEW;
function choose(item) {
  selected = item && item.run ? item : null;
  for (const row of byId("rows").children) row.classList.toggle("selected", row.collective === selected);
  redraw();
}
function why(outcomes) {
  const cell = make("td", "", "why"), lines = outcomes.map((outcome) => {
    const line = make("div"), blocking = outcome.blocking ? ` (${outcome.blocking})` : "";
    const told = `${outcome.pass}: ${outcome.sentence}${blocking}`;
    line.append(make("span", outcome.reason, `chip ${outcome.sort}`), told);
    return line;
  });
  if (!lines.length) cell.append(make("span", "no pass has considered it", "muted"));
  const isExposed = outcomes.length && outcomes[0].reason.startsWith("exposed"); // its cause comes first
  const first = isExposed ? 0 : Math.max(0, outcomes.findIndex((outcome) => outcome.sort === "refused"));
  cell.append(...lines.splice(first, 1));
  if (lines.length) {
    const more = make("details");
    more.append(make("summary", `${lines.length} more`), ...lines);
    cell.append(more);
  }
  return cell;
}
function rowOf(c, most) {
  const row = make("tr"), first = make("td"), name = make("button", c.name, "name");
  const exposed = make("td", duration(c.exposed), "number"), share = make("div", "", "share");
  const numbers = [size(c.bytes), time(c.start), duration(c.end - c.start), duration(c.hidden)];
  name.type = "button"; name.title = "Show it in the timelines";
  name.addEventListener("click", () => {
    const from = Math.min(c.launched, c.start), room = (c.until - from) * 0.6;
    choose(c); show(from - room, c.until + room);
    canvas.scrollIntoView({ block: "nearest" });
  });
  share.style.width = `${(c.exposed / most) * 100}%`; exposed.append(share); first.append(name);
  if (c.of) first.append(make("div", `${c.kind} of ${c.of}`, "muted"));
  row.append(first, make("td", c.run.label), make("td", hasLayers ? c.layer : c.kind), make("td", c.group),
    ...numbers.map((text) => make("td", text, "number")), exposed, why(c.outcomes));
  row.collective = c; row.classList.toggle("selected", c === selected);
  return row;
}
function headingOf(layer, members) {
  const row = make("tr", "", "group"), cell = make("th", layer || "no layer");
  const exposed = runs.map((run) => [run, members.filter((c) => c.run === run)]).filter(([, mine]) => mine.length)
    .map(([run, mine]) => `${run.label} ${mine.length}, exposed ${duration(mine.reduce((sum, c) => sum + c.exposed, 0))}`);
  cell.colSpan = COLUMNS.length; cell.scope = "rowgroup";
  cell.append(make("span", ` \u00b7 ${exposed.join(" \u00b7 ")}`, "muted"));
  row.append(cell);
  return row;
}
function withHeadings(found, rows) {
  const layers = new Map();
  for (const c of found) layers.has(c.layer) ? layers.get(c.layer).push(c) : layers.set(c.layer, [c]);
  return rows.flatMap((row, i) => i && rows[i - 1].collective.layer === row.collective.layer ? [row]
    : [headingOf(row.collective.layer, layers.get(row.collective.layer)), row]);
}
function list() {
  const text = byId("filter").value.trim().toLowerCase(), which = byId("which").value, only = byId("only").checked;
  const key = COLUMNS[sorting.column][1], sign = sorting.down ? -1 : 1;
  const fits = everything.filter((c) => (!only || c.exposed > 0) && c.words.includes(text));
  const found = fits.filter((c) => !which || c.run.label === which);
  matches = text || only ? new Set(fits) : null;
  found.sort((a, b) => (key(a) < key(b) ? -sign : key(a) > key(b) ? sign : a.start - b.start));
  const most = found.reduce((largest, c) => Math.max(largest, c.exposed), 1);
  const rows = found.slice(0, shown).map((c) => rowOf(c, most));
  byId("rows").replaceChildren(...(sorting.column === LAYER ? withHeadings(found, rows) : rows));
  byId("count").textContent = `${found.length} of ${everything.length}`;
  byId("more").parentElement.hidden = found.length <= shown;
  [...byId("columns").children].forEach((head, i) => {
    if (i === sorting.column) head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  });
  redraw();
}
COLUMNS.forEach(([name], column) => {
  const head = make("th", "", isNumber(column) ? "number" : ""), button = make("button", name);
  button.type = "button"; head.scope = "col"; head.append(button); byId("columns").append(head);
  button.addEventListener("click", () => {
    sorting = { column, down: sorting.column === column ? !sorting.down : isNumber(column) };
    list();
  });
});
for (const id of ["filter", "which", "only"]) byId(id).addEventListener("input", () => { shown = FEW; list(); });
byId("more").addEventListener("click", () => { shown += 500; list(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", resize);
addEventListener("resize", resize);
resize();
list();
