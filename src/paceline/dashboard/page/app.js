// The page: the list of runs, one run live, several compared. Polls the server once per second.
const START = JSON.parse(document.getElementById("start").textContent);
const POLL_MS = 1000;
const state = { runs: START.runs, selected: new Set(), view: null, hash: null };
const $ = id => document.getElementById(id);

function make(tag, facts = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(facts)) {
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function makeTable(columns, rows, words) {
  const kind = i => words.includes(columns[i]) ? "word" : "";
  const head = make("tr", {}, ...columns.map((c, i) => make("th", { class: kind(i), scope: "col", text: c })));
  const body = rows.map(row => make("tr", {}, ...row.map((cell, i) => make("td", { class: kind(i), text: String(cell ?? "–") }))));
  return make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": columns[0] + " table" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
}

const nameOf = run => (run.labels && run.labels.arm) || run.strategy || run.id;
const countOf = (n, word) => n + " " + word + (n === 1 ? "" : "s");
const stateOf = run => run.status || "unknown";
const describeState = run => stateOf(run) === "silent" ? "silent for " + formatDuration(run.silent_s) : stateOf(run);

// The list

function drawList() {
  const wanted = $("filter").value.trim().toLowerCase();
  const shown = state.runs.filter(run => !wanted || [run.id, run.strategy, run.model, run.data, run.status].join(" ").toLowerCase().includes(wanted));
  const going = state.runs.filter(r => r.status === "running").length;
  $("counts").textContent = state.runs.length + " runs, " + going + " running" + (shown.length < state.runs.length ? ", " + shown.length + " shown" : "");
  $("compare").disabled = state.selected.size < 2;
  $("compare").textContent = state.selected.size < 2 ? "Compare selected" : "Compare " + state.selected.size + " runs";
  const list = $("runs");
  const old = new Map([...list.children].map(node => [node.dataset.id, node]));
  const nodes = shown.map(run => updateItem(old.get(run.id) || makeItem(run.id), run));
  // Nodes are not moved unless the order changes, which keeps the keyboard focus.
  if (nodes.length !== list.children.length || nodes.some((node, i) => list.children[i] !== node)) {
    const focus = document.activeElement;
    list.replaceChildren(...nodes);
    if (focus && list.contains(focus)) focus.focus();
  }
  if (!state.runs.length && !list.children.length) list.replaceChildren(make("li", { text: "No runs yet. A run appears here when it starts." }));
}

function makeItem(id) {
  const box = make("input", { type: "checkbox", "aria-label": "Select " + id });
  box.addEventListener("change", () => {
    if (box.checked) state.selected.add(id); else state.selected.delete(id);
    drawList();
  });
  const link = make("a", { href: "#run=" + encodeURIComponent(id) }, make("b"), make("span", { class: "facts" }),
    make("div", { class: "meter", hidden: true }, make("div")));
  const item = make("li", {}, box, link);
  item.dataset.id = id;
  return item;
}

function updateItem(item, run) {
  const [box, link] = item.children, [title, facts, meter] = link.children;
  box.checked = state.selected.has(run.id);
  const isOpen = state.view && state.view.id === run.id;
  item.className = isOpen ? "open" : "";
  if (isOpen) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
  const badge = make("span", { class: "state " + stateOf(run), text: describeState(run) });
  setOnce(title, run.id);
  const words = [nameOf(run), run.model && run.data ? run.model + " on " + run.data : null, run.workers ? countOf(run.workers, "worker") : null,
    run.test_acc != null ? "test " + formatShare(run.test_acc) : run.val_acc != null ? "val " + formatShare(run.val_acc) : null,
    run.left_s != null ? formatDuration(run.left_s) + " left" : run.seconds != null ? formatDuration(run.seconds) + (run.virtual ? " virtual" : "") : null];
  const text = words.filter(Boolean).join(" · ");
  if (facts.dataset.key !== describeState(run) + text) {
    facts.dataset.key = describeState(run) + text;
    facts.replaceChildren(badge, " " + text);
  }
  meter.hidden = run.status !== "running" || run.share == null;
  meter.firstChild.style.width = 100 * (run.share || 0) + "%";
  return item;
}

// Formats a value of the metric table (START.metrics) by its unit.
function formatMetric(metric, value) {
  if (value === null || value === undefined) return "–";
  return { SECONDS: formatDuration, BYTES: formatBytes, FRACTION: formatShare, COUNT: formatNumber, LOSS: trim }[metric.unit](value);
}

function setOnce(node, text) { if (node.textContent !== text) node.textContent = text; }

// One run

class RunView {
  constructor(id) {
    this.id = id; this.generation = ""; this.have = 0; this.rows = new Map(); this.series = {}; this.who = null; this.against = "seconds";
    const main = $("view");
    this.head = make("div");
    this.verdicts = make("div", { role: "log", "aria-label": "Verdicts" });
    const curves = make("div", { class: "grid" }), resources = make("div", { class: "grid" }), stale = make("div", { class: "grid" });
    this.axis = ["seconds", "samples"].map(name => make("button", { type: "button", "aria-pressed": String(name === "seconds"), text: "by " + name, onclick: () => this.setAxis(name) }));
    this.timelineBox = make("div");
    this.picker = make("select", { "aria-label": "Process to highlight", onchange: e => this.choose(e.target.value || null) });
    this.rest = make("div");
    this.staleHead = make("h3", { text: "Staleness" });
    this.staleBox = stale;
    this.resourceHead = make("div", { class: "buttons" }, make("h3", { text: "Resources" }), make("label", {}, "Highlight ", this.picker));
    main.replaceChildren(this.head, this.verdicts, make("h3", { text: "Learning" }), make("div", { class: "buttons" }, ...this.axis), curves,
      make("h3", { text: "Time categories" }), this.timelineBox, this.resourceHead, resources, this.staleHead, stale, this.rest);
    this.charts = {
      loss: new Chart(curves, { title: "Training loss" }),
      acc: new Chart(curves, { title: "Accuracy", formatY: x => x === null ? "–" : (100 * x).toFixed(1) + "%" }),
      rate: new Chart(curves, { title: "Samples per second", zero: true }),
      cpu: new Chart(resources, { title: "CPU cores in use per process", zero: true }),
      memory: new Chart(resources, { title: "Memory per process", formatY: formatBytes, zero: true }),
      net: new Chart(resources, { title: "Network per process: bytes received and sent per second", formatY: formatBytes, zero: true }),
      disk: new Chart(resources, { title: "Run-queue wait (s/s)", zero: true }),
      machine: new Chart(resources, { title: "Hosts: CPU utilization", formatY: x => x === null ? "–" : Math.round(100 * x) + "%", zero: true, top: 1 }),
      machineMemory: new Chart(resources, { title: "Hosts: memory in use", formatY: formatBytes, zero: true }),
      stale: new Chart(stale, { title: "Staleness in updates (mean, max)", zero: true }),
      lags: new Chart(stale, { title: "Staleness histogram", formatX: x => String(Math.round(x * 10) / 10), formatY: x => x === null ? "–" : Math.round(100 * x) + "%", zero: true }),
    };
    this.timeline = new Timeline(this.timelineBox, START.phases, START.server_phases);
    this.timeline.onChoose = who => this.choose(who);
  }

  setAxis(name) {
    this.against = name;
    for (const button of this.axis) button.setAttribute("aria-pressed", button.textContent === "by " + name);
    this.drawCurves();
  }

  choose(who) {
    this.who = who; this.timeline.chosen = who; this.picker.value = who || "";
    this.generation = "";
    tick();
  }

  async ask() {
    const query = new URLSearchParams({ id: this.id, generation: this.generation, from: this.have, who: this.who || "" });
    const payload = await fetchJson("/api/run?" + query);
    if (state.view !== this) return;
    this.take(payload);
  }

  take(payload) {
    if (payload.generation !== this.generation) { this.rows.clear(); this.series = {}; }
    this.generation = payload.generation; this.have = payload.bins; this.payload = payload;
    for (const row of payload.timeline) this.takeRow(row, payload);
    this.join("resources", payload.resources, payload); this.join("machines", payload.machines, payload); this.join("staleness", payload.staleness, payload);
    this.draw();
  }

  // Bins from `from` on replace the previous ones: the newest may still change.
  takeRow(row, payload) {
    const count = row.phases.length, fresh = Uint8Array.from(atob(row.shares), c => c.charCodeAt(0));
    const kept = this.rows.get(row.who), shares = new Uint8Array(payload.bins * count);
    if (kept) shares.set(kept.shares.subarray(0, payload.from * count));
    shares.set(fresh, payload.from * count);
    this.rows.set(row.who, { ...row, shares });
  }

  join(name, value, payload) {
    const merge = (old, now) => {
      if (Array.isArray(now) && now.every(x => x === null || typeof x === "number")) {
        const base = Array.isArray(old) ? old.slice(0, payload.from) : [];
        while (base.length < payload.from) base.push(null);
        return base.concat(now);
      }
      if (Array.isArray(now)) return now.map((part, i) => merge(old && old[i], part));
      if (now && typeof now === "object") return Object.fromEntries(Object.entries(now).map(([k, v]) => [k, k === "histogram" ? v : merge(old && old[k], v)]));
      return now;
    };
    this.series[name] = merge(this.series[name], value);
  }

  draw() {
    this.drawHead(); this.drawVerdicts(); this.drawCurves(); this.drawTimeline(); this.drawResources(); this.drawStaleness(); this.drawRest();
  }

  drawHead() {
    const run = this.payload.run, config = this.payload.config || {};
    const live = { train_loss: run.train_loss ?? run.loss };
    const figures = [["time left", run.left_s != null ? formatDuration(run.left_s) : null],
      ["epoch", run.epoch != null ? run.epoch + (run.status === "running" ? 1 : 0) - (run.status === "running" && run.epoch === run.asked_epochs ? 1 : 0) + " of " + (run.asked_epochs ?? "?") : null],
      ...START.metrics.map(metric => [metric.title, formatMetric(metric, live[metric.key] ?? run[metric.key])])].filter(f => f[1] !== null && f[1] !== "–");
    const parts = [make("h2", {}, this.id + " ", make("span", { class: "state " + stateOf(run), text: describeState(run) })),
      make("p", { class: "soft", text: [run.strategy, run.model && run.model + " on " + run.data, countOf(run.workers, "worker") + (run.servers ? ", " + countOf(run.servers, "server") : ""),
        run.batch && "batch " + run.batch, run.seed != null && "seed " + run.seed, run.virtual && "virtual time", config.started && "started " + config.started].filter(Boolean).join(" · ") }),
      make("div", { class: "meter", role: "progressbar", "aria-label": "Progress", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * (run.share || 0)) },
        Object.assign(make("div"), { style: "width:" + 100 * (run.share || 0) + "%" })),
      make("dl", { class: "figures" }, ...figures.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }))))];
    if (this.payload.reading < 1) parts.push(make("p", { class: "soft", text: "Reading events: " + Math.round(100 * this.payload.reading) + "%" }));
    if (run.status === "silent") parts.push(make("p", { class: "problem", text: "No events for " + formatDuration(run.silent_s) + " and no result: the run was interrupted or is stuck. The data shown is what its files contain." }));
    if (this.payload.missing.length) parts.push(make("div", { class: "problem" }, make("p", { text: "Incomplete:" }), make("ul", {}, ...this.payload.missing.slice(0, 12).map(text => make("li", { text })))));
    if (run.error) parts.push(make("p", { class: "problem", text: run.error }));
    this.head.replaceChildren(...parts);
  }

  drawVerdicts() {
    const key = JSON.stringify(this.payload.verdicts);
    if (key === this.verdictKey) return;
    this.verdictKey = key;
    const ordered = [...this.payload.verdicts].sort((a, b) => (a.over_t !== undefined) - (b.over_t !== undefined) || b.t - a.t);
    this.verdicts.replaceChildren(...ordered.map(v => make("div", { class: "problem" + (v.over_t !== undefined ? " over" : "") },
      make("p", {}, make("strong", { text: v.text })), make("p", { text: v.suggestion || "" }),
      make("small", { text: (v.rule || "") + ", since " + formatClock(v.t) + (v.over_t !== undefined ? ", resolved at " + formatClock(v.over_t) : "") }))));
  }

  marks() {
    return this.payload.switches.map(s => ({ x: this.against === "seconds" ? s.t : s.samples, text: s.from + " → " + s.to }));
  }

  drawCurves() {
    if (!this.payload) return;
    const pick = this.against === "seconds" ? 0 : 1, c = START.colours;
    const formatX = this.against === "seconds" ? formatClock : formatNumber;
    for (const name of ["loss", "acc", "rate"]) this.charts[name].formatX = formatX;
    const rows = this.payload.history, at = row => this.against === "seconds" ? row.seconds : row.samples;
    const points = key => rows.filter(r => r[key] != null).map(r => [at(r), r[key]]);
    this.charts.loss.set([{ name: "epoch so far", colour: c[0], points: this.payload.loss.filter(p => p[3] !== null).map(p => [p[pick], p[3]]), bold: false },
      { name: "training, by epoch", colour: c[0], points: points("train_loss"), dots: true }, { name: "validation", colour: c[1], dash: 1, points: points("val_loss"), dots: true }], this.marks());
    this.charts.acc.set([{ name: "training", colour: c[0], points: points("train_acc"), dots: true }, { name: "validation", colour: c[1], dash: 1, points: points("val_acc"), dots: true }], this.marks());
    const rates = [];
    const loss = this.payload.loss;
    const ends = loss.length ? loss[loss.length - 1][0] - loss[0][0] : 0, far = Math.max(2, ends / 120);
    for (let i = 0, j = 1; j < loss.length; j++) {
      const dt = loss[j][0] - loss[i][0], n = loss[j][1] - loss[i][1];
      if (dt < far) continue;
      if (n >= 0) rates.push([loss[j][pick], n / dt]);
      i = j;
    }
    this.charts.rate.set([{ name: "samples/s", colour: c[2], points: rates }], this.marks());
  }

  drawTimeline() {
    this.timeline.set(this.payload.timeline.map(row => this.rows.get(row.who)), this.payload.bins, this.payload.width_s, this.payload.switches.map(s => ({ x: s.t })));
    const names = this.payload.timeline.map(row => row.who);
    if (this.picker.children.length !== names.length + 1) {
      this.picker.replaceChildren(make("option", { value: "", text: "none" }), ...names.map(who => make("option", { value: who, text: who.replace("-", " ") })));
      this.picker.value = this.who || "";
    }
  }

  drawResources() {
    const w = this.payload.width_s, roles = this.series.resources || {}, c = START.colours;
    const at = i => (i + 0.5) * w;
    const line = (values, facts) => ({ ...facts, points: (values || []).map((y, i) => [at(i), y]) });
    const looks = { worker: [c[0], 0, "workers"], server: [c[1], 1, "servers"], run: [c[2], 2, "coordinator"], chosen: [c[3], 3, (this.who || "").replace("-", " ")] };
    const roleLines = fields => Object.keys(looks).filter(r => roles[r]).flatMap(r => fields.map(([field, word], k) => {
      const s = roles[r][field], [colour, dash, name] = looks[r];
      const many = roles[r].count > 1;
      return line(s.mean, { name: (many ? name + ", mean" : name) + word, colour: k ? c[r === "server" ? 5 : 4] : colour, dash: k ? 3 : dash, bold: r !== "run",
        band: many ? s.least.map((low, i) => [at(i), low, s.most[i]]) : null });
    }));
    const known = Object.keys(roles).length > 0 || (this.series.machines || []).length > 0;
    for (const name of ["cpu", "memory", "net", "disk", "machine", "machineMemory"]) this.charts[name].box.hidden = !known;
    this.resourceHead.hidden = !known;
    if (!known) return;
    this.charts.cpu.set(roleLines([["cpu", ""]]));
    this.charts.memory.set(roleLines([["memory", ""]]));
    this.charts.net.set(roleLines([["net_in", " received"], ["net_out", " sent"]]).filter(s => !s.name.startsWith("coordinator")));
    this.charts.disk.set(roleLines([["run_wait", ""]]));
    const machines = this.series.machines || [];
    this.charts.machine.set(machines.map((m, i) => line(m.busy, { name: m.host, colour: c[i % c.length], dash: Math.floor(i / c.length) })));
    this.charts.machineMemory.set(machines.map((m, i) => line(m.memory, { name: m.host + " of " + formatBytes(m.memory_total), colour: c[i % c.length], dash: Math.floor(i / c.length) })));
  }

  drawStaleness() {
    const s = this.series.staleness || {}, w = this.payload.width_s, c = START.colours;
    const known = s.mean && s.mean.some(x => x !== null);
    this.staleHead.hidden = this.staleBox.hidden = !known;
    if (!known) return;
    const line = (values, facts) => ({ ...facts, points: values.map((y, i) => [(i + 0.5) * w, y]) });
    this.charts.stale.set([line(s.mean, { name: "mean", colour: c[0] }), line(s.max, { name: "max", colour: c[1], dash: 1 })]);
    const counts = Object.entries(s.histogram).map(([lag, n]) => [Number(lag), n]), total = counts.reduce((a, p) => a + p[1], 0);
    this.charts.lags.set([{ name: "share", colour: c[0], points: counts.map(([lag, n]) => [lag, n / total]), bars: true }]);
  }

  drawRest() {
    const payload = this.payload;
    const key = JSON.stringify([payload.switches, payload.marks.length, payload.run.status, this.rows.size, Math.floor(payload.bins / 5)]);
    if (key === this.restKey) return;
    this.restKey = key;
    const open = new Set([...this.rest.querySelectorAll("details[open]")].map(d => d.dataset.name));
    const parts = [];
    if (payload.switches.length) parts.push(make("h3", { text: "Switches" }), makeTable(["at", "samples", "from", "to", "pause", "drain", "reason"],
      payload.switches.map(s => [formatClock(s.t), formatNumber(s.samples), s.from, s.to, formatDuration(s.pause_s), formatDuration(s.drain_s), s.reason]), ["from", "to", "reason"]));
    const fold = (name, title, body) => { const d = make("details", {}, make("summary", { text: title }), body); d.dataset.name = name; d.open = open.has(name); parts.push(d); };
    const rows = payload.timeline.map(row => this.rows.get(row.who));
    if (rows.length) {
      const names = [...new Set(rows.filter(r => !r.who.startsWith("server-")).flatMap(r => r.phases))];
      fold("phases", "Seconds by time category", makeTable(["process", ...names.map(n => n.replace("_", " "))],
        rows.filter(r => !r.who.startsWith("server-")).map(r => [r.who.replace("-", " "), ...names.map(n => { const i = r.phases.indexOf(n); return i < 0 ? "–" : trim(r.totals[i]); })]), ["process"]));
    }
    const lines = payload.marks.map(e => [formatClock(e.t), e.kind, e.text]).reverse();
    if (lines.length) fold("events", "Events (" + lines.length + ")", makeTable(["at", "kind", "what"], lines, ["kind", "what"]));
    fold("config", "Configuration", make("pre", { text: JSON.stringify(payload.config, null, 2) }));
    this.rest.replaceChildren(...parts);
  }

  redraw() { if (this.payload) this.draw(); }
}

// Several runs

class CompareView {
  constructor(ids) {
    this.ids = ids; this.against = "seconds"; this.runs = [];
    this.axis = ["seconds", "samples"].map(name => make("button", { type: "button", "aria-pressed": String(name === "seconds"), text: "by " + name, onclick: () => this.setAxis(name) }));
    const curves = make("div", { class: "grid" });
    this.table = make("div"); this.bars = make("div");
    $("view").replaceChildren(make("h2", { text: ids.length + " runs compared" }), this.table, make("div", { class: "buttons" }, ...this.axis), curves, make("h3", { text: "Time categories (mean over workers)" }), this.bars);
    this.charts = { val: new Chart(curves, { title: "Validation accuracy", height: 240, formatY: x => x === null ? "–" : (100 * x).toFixed(1) + "%" }),
      train: new Chart(curves, { title: "Training accuracy", height: 240, formatY: x => x === null ? "–" : (100 * x).toFixed(1) + "%" }),
      loss: new Chart(curves, { title: "Training loss", height: 240 }) };
  }

  setAxis(name) {
    this.against = name;
    for (const button of this.axis) button.setAttribute("aria-pressed", button.textContent === "by " + name);
    this.draw();
  }

  async ask() {
    const payload = await fetchJson("/api/curves?" + new URLSearchParams({ ids: this.ids.join("\n") }));
    if (state.view !== this) return;
    this.runs = payload.runs;
    this.draw();
  }

  draw() {
    const c = START.colours, at = row => this.against === "seconds" ? row.seconds : row.samples;
    const look = i => ({ colour: c[i % c.length], dash: Math.floor(i / c.length) });
    const first = this.runs[0] && this.runs[0].run;
    const versusFirst = run => first.seconds && run.seconds && run !== first ? "× " + (run.seconds / first.seconds).toFixed(2) + " (" + (run.seconds >= first.seconds ? "+" : "−") + formatDuration(Math.abs(run.seconds - first.seconds)) + ")" : "–";
    this.table.replaceChildren(makeTable(["run", "strategy", "status", "time vs. first", ...START.metrics.map(m => m.title)],
      this.runs.map(({ run }) => [run.id, nameOf(run), describeState(run), versusFirst(run), ...START.metrics.map(m => formatMetric(m, run[m.key]))]), ["run", "strategy", "status"]),
      make("p", { class: "soft", text: "Time vs. first: below 1 is faster than the first run. Single runs have no spread; paceline report compares several seeds." }));
    for (const chart of Object.values(this.charts)) chart.formatX = this.against === "seconds" ? formatClock : formatNumber;
    for (const [name, key] of [["val", "val_acc"], ["train", "train_acc"], ["loss", "train_loss"]]) {
      this.charts[name].set(this.runs.map((r, i) => ({ name: r.run.id, ...look(i), dots: true, points: r.history.filter(row => row[key] != null).map(row => [at(row), row[key]]) })));
    }
    this.drawBars();
  }

  drawBars() {
    const rows = this.runs.map(r => {
      const workers = Object.entries(r.phases).filter(([who]) => who.startsWith("worker-")), sums = {};
      for (const [, [names, totals]] of workers) names.forEach((n, i) => { sums[n] = (sums[n] || 0) + totals[i]; });
      const whole = Object.values(sums).reduce((a, b) => a + b, 0);
      return [r.run.id, sums, whole];
    }).filter(r => r[2] > 0);
    const names = Object.keys(START.phases).filter(n => rows.some(r => r[1][n] > 0));
    this.bars.replaceChildren(rows.length ? makeTable(["run", ...names.map(n => n.replace("_", " "))], rows.map(([id, sums, whole]) => [id, ...names.map(n => sums[n] ? Math.round(100 * sums[n] / whole) + "%" : "–")]), ["run"]) : make("p", { class: "soft", text: "No run has recorded time categories." }));
  }

  redraw() { this.draw(); }
}

// Polling

async function fetchJson(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

function openHash() {
  const [kind, value] = location.hash.slice(1).split("=");
  state.hash = location.hash;
  if (kind === "run" && value) state.view = new RunView(decodeURIComponent(value));
  else if (kind === "compare" && value) {
    const ids = value.split(",").map(decodeURIComponent);
    state.selected = new Set(ids);
    state.view = new CompareView(ids);
  } else if (state.runs.length) {
    history.replaceState(null, "", "#run=" + encodeURIComponent(state.runs[0].id));
    return openHash();
  } else {
    state.view = null;
    $("view").replaceChildren(make("p", { class: "soft", text: "No runs in this folder yet. Start one with paceline train --out in this folder; it appears here automatically." }));
  }
  drawList();
  tick();
}

let asking = false, again = false;
async function tick() {
  if (asking) { again = true; return; }
  asking = true;
  try {
    const view = state.view;
    const [list] = await Promise.all([fetchJson("/api/runs"), view ? view.ask() : null]);
    state.runs = list.runs;
    if (!state.view && state.runs.length) openHash();
    drawList();
    $("pulse").className = "";
    setOnce($("pulse"), "live, updated at " + new Date().toLocaleTimeString());
  } catch (error) {
    $("pulse").className = "lost";
    setOnce($("pulse"), "no answer from the server: " + error.message + "; the data shown is outdated, retrying");
  }
  asking = false;
  if (again) { again = false; tick(); }
}

$("folder").textContent = START.folder;
$("filter").addEventListener("input", drawList);
$("compare").addEventListener("click", () => { location.hash = "#compare=" + [...state.selected].map(encodeURIComponent).join(","); });
addEventListener("hashchange", () => { if (location.hash !== state.hash) openHash(); });
const redrawAll = () => { hatchings.clear(); if (state.view) state.view.redraw(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redrawAll, 120); });
openHash();
setInterval(() => { if (!document.hidden) tick(); }, POLL_MS);
document.addEventListener("visibilitychange", () => { if (!document.hidden) tick(); });
