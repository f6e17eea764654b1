"use strict";
// Draws what data.json has, every two seconds. Text only ever goes in as text.
const NS = "http://www.w3.org/2000/svg";
const WIDTH = 380, HEIGHT = 170, LEFT = 54, RIGHT = 8, TOP = 10, BOTTOM = 22;
const EVERY_MS = 2000;
let chosen = null, latest = null;

const byId = (id) => document.getElementById(id);
const make = (tag, text, className) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};
const draw = (tag, attributes, text) => {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const short = (value) => {
  if (value === undefined || value === null) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
};
const seconds = (value) => (value === undefined ? "–" : value >= 1 ? `${value.toFixed(2)} s` : `${Math.round(1000 * value)} ms`);
const bytes = (value) => (value === undefined ? "–" : `${(value / 1e9).toFixed(2)} GB`);
const ofAll = (step) => (step.steps === undefined ? short(step.step) : `${short(step.step)} of ${short(step.steps)}`);
// Of the steps to come, at the pace of the last ones; nothing of a run that has ended, or that nobody writes any more.
const left = (run, now) => {
  const last = run.steps[run.steps.length - 1] || {}, timed = run.steps.slice(-20).filter((step) => step.step_time_s > 0);
  if (last.steps === undefined || !timed.length) return "";
  if (last.step >= last.steps) return "all done";
  const pace = timed.reduce((sum, step) => sum + step.step_time_s, 0) / timed.length;
  if (now - run.written > Math.max(300, 20 * pace)) return "";
  return `about ${span(pace * (last.steps - last.step))} left`;
};
const span = (time) => (time < 90 ? `${Math.round(time)} s` : time < 5400 ? `${Math.round(time / 60)} min` : `${(time / 3600).toFixed(1)} h`);
const rate = (step) => (step.tokens !== undefined && step.step_time_s > 0 ? step.tokens / step.step_time_s : undefined);
const points = (steps, value) => steps.map((step) => [step.step, value(step)]).filter((point) => point[1] !== undefined);

const PANELS = [
  { title: "loss", of: (step) => step.loss, text: short, others: true, marks: (run) => points(run.evaluations, (e) => e.eval_loss), marked: "held out" },
  { title: "learning rate", of: (step) => step.lr, text: short, zero: true },
  { title: "gradient norm, unclipped", of: (step) => step.grad_norm, text: short, zero: true },
  { title: "trained tokens/s", of: rate, text: short, zero: true },
  { title: "time of a step", of: (step) => step.step_time_s, text: seconds, zero: true, line: (step) => step.planned_step_time_s, lined: "planned" },
  { title: "peak memory of rank 0", of: (step) => step.peak_memory_bytes, text: bytes, zero: true },
];

const named = (names) => `other runs: ${names.slice(0, 3).join(", ")}${names.length > 3 ? ` and ${names.length - 3} more` : ""}`;
// Of metrics on generated answers: the names that a run has given them.
const metrics = (run) => [...new Set(run.evaluations.flatMap(Object.keys))].filter((name) => name !== "step" && name !== "eval_loss")
  .map((name) => ({ title: `held out: ${name.slice("eval_".length)}`, of: (one) => one[name], text: short, zero: true, evaluated: true }));

const panel = (what, run, others) => {
  const ours = points(what.evaluated ? run.evaluations : run.steps, what.of);
  const box = make("article", undefined, "panel"), head = make("header"), out = make("output");
  head.append(make("h3", what.title), out);
  const legend = make("div", undefined, "legend");
  const planned = what.line ? points(run.steps, what.line) : [];
  const marks = what.marks ? what.marks(run) : [];
  const beside = what.others ? others.filter((other) => points(other.steps, what.of).length) : [];
  const rest = beside.map((other) => points(other.steps, what.of));
  if (planned.length || marks.length || rest.length) {
    legend.append(make("span", "this run", "ours"));
    if (marks.length) legend.append(make("span", what.marked, "mark"));
    if (planned.length) legend.append(make("span", what.lined, "mark"));
    // By name: a loss of another task on this axis says nothing of this run.
    if (rest.length) legend.append(make("span", named(beside.map((other) => other.name)), "other"));
  }
  box.append(head, legend);
  const all = [...ours, ...marks, ...planned, ...rest.flat()];
  if (!ours.length) {
    box.append(make("p", "not recorded", "quiet"));
    return box;
  }
  const xs = all.map((p) => p[0]), ys = all.map((p) => p[1]);
  const least = (list) => list.reduce((a, b) => Math.min(a, b)), most = (list) => list.reduce((a, b) => Math.max(a, b));
  const x0 = least(xs), x1 = Math.max(most(xs), x0 + 1);
  let y0 = what.zero ? Math.min(0, least(ys)) : least(ys), y1 = most(ys);
  if (y1 - y0 < 1e-12 * Math.max(1, Math.abs(y1))) { y0 -= 0.5 * (Math.abs(y1) || 1); y1 += 0.5 * (Math.abs(y1) || 1); }
  const x = (step) => LEFT + ((step - x0) / (x1 - x0)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": what.title });
  for (let i = 0; i <= 3; i++) {
    const value = y0 + ((y1 - y0) * i) / 3;
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, what.text(value)));
  }
  svg.append(draw("text", { x: LEFT, y: HEIGHT - 4 }, short(x0)));
  svg.append(draw("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, `step ${short(x1)}`));
  const path = (curve) => curve.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
  rest.forEach((curve, i) => {
    const other = draw("path", { class: "other", d: path(curve) });
    other.append(draw("title", {}, beside[i].name));
    svg.append(other);
  });
  if (planned.length) svg.append(draw("path", { class: "mark", d: path(planned) }));
  svg.append(draw("path", { class: "ours", d: ours.length > 1 ? path(ours) : `${path(ours)}l0.1 0` }));
  for (const mark of marks) svg.append(draw("circle", { class: "mark", cx: x(mark[0]), cy: y(mark[1]), r: 3.2 }));
  const cursor = draw("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  svg.append(cursor);
  const last = ours[ours.length - 1];
  const say = (point) => { out.textContent = `step ${short(point[0])}: ${what.text(point[1])}`; };
  say(last);
  svg.addEventListener("pointermove", (event) => {
    const area = svg.getBoundingClientRect();
    const at = ((event.clientX - area.left) / area.width) * WIDTH;
    const near = ours.reduce((a, b) => (Math.abs(x(b[0]) - at) < Math.abs(x(a[0]) - at) ? b : a));
    cursor.setAttribute("x1", x(near[0]));
    cursor.setAttribute("x2", x(near[0]));
    cursor.setAttribute("visibility", "visible");
    say(near);
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); say(last); });
  box.append(svg);
  return box;
};

const facts = (run, now) => {
  const last = run.steps[run.steps.length - 1] || {}, evaluated = run.evaluations[run.evaluations.length - 1];
  const rows = [
    ["step", ofAll(last), left(run, now)],
    ["loss", short(last.loss)],
    ["held out", evaluated ? `${short(evaluated.eval_loss)}` : "–"],
    ["learning rate", short(last.lr)],
    ["gradient norm", short(last.grad_norm)],
    ["trained tokens/s", short(rate(last))],
    ["a step", seconds(last.step_time_s), last.planned_step_time_s === undefined ? "" : ` planned ${seconds(last.planned_step_time_s)}`],
    ["memory, rank 0", bytes(last.peak_memory_bytes)],
  ];
  byId("facts").replaceChildren(...rows.map(([name, value, more]) => {
    const box = make("div"), shown = make("dd", value);
    if (more) shown.append(make("small", more));
    box.append(make("dt", name), shown);
    return box;
  }));
};

const ago = (then, now) => {
  const past = Math.max(0, now - then);
  return past < 90 ? `${Math.round(past)} s ago` : past < 5400 ? `${Math.round(past / 60)} min ago` : past < 129600 ? `${Math.round(past / 3600)} h ago` : `${Math.round(past / 86400)} d ago`;
};

const table = (data) => {
  byId("runs").replaceChildren(...data.runs.map((run) => {
    const last = run.steps[run.steps.length - 1] || {}, evaluated = run.evaluations[run.evaluations.length - 1] || {};
    const row = make("tr", undefined, run.name === data.chosen ? "chosen" : ""), cell = make("td"), button = make("button", run.name);
    button.type = "button";
    button.addEventListener("click", () => { chosen = run.name; look(); });
    cell.append(button);
    row.append(cell, make("td", ofAll(last)), make("td", short(last.loss)), make("td", short(evaluated.eval_loss)), make("td", ago(run.written, data.now)));
    return row;
  }));
};

const samples = (data) => {
  if (!data.samples.length) return;
  byId("samples").replaceChildren(...data.samples.map((sample) => {
    const box = make("div", undefined, "sample"), text = make("pre");
    text.append(make("span", sample.prompt, "prompt"), sample.text);
    box.append(make("p", `step ${short(sample.step)}`, "quiet"), text);
    return box;
  }));
};

const state = (text, className) => {
  byId("state").textContent = text;
  byId("state").className = className;
};

const look = async () => {
  let text;
  try {
    const answer = await fetch(`data.json${chosen === null ? "" : `?run=${encodeURIComponent(chosen)}`}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    text = await answer.text();
  } catch {
    state("the run has ended, or its page: what is shown is the last that came", "lost");
    return;
  }
  const data = JSON.parse(text);
  const run = data.runs.find((one) => one.name === data.chosen);
  if (!run) {
    state("no step yet", "live");
    return;
  }
  state(`live, ${ago(run.written, data.now)}`, "live");
  table(data);
  const same = JSON.stringify([data.runs.map((one) => [one.name, one.steps.length, one.written]), data.chosen]);
  if (same === latest) return;
  latest = same;
  byId("name").textContent = run.name;
  document.title = `${run.name}: meshlora`;
  facts(run, data.now);
  byId("panels").replaceChildren(...[...PANELS, ...metrics(run)].map((what) => panel(what, run, data.runs.filter((one) => one !== run))));
  samples(data);
};

look();
setInterval(look, EVERY_MS);
