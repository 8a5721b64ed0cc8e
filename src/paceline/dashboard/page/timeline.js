// One row per process, one column per time bin, coloured by time category.
const HATCH_INK = "#333333";
const THIN = 10;
const hatchings = new Map();

function makeHatching(pen, colour, kind) {
  const key = colour + kind;
  if (hatchings.has(key)) return hatchings.get(key);
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  ink.fillStyle = colour; ink.fillRect(0, 0, 6, 6);
  ink.strokeStyle = ink.fillStyle = HATCH_INK; ink.lineWidth = 1;
  ink.beginPath();
  if (kind === "/" || kind === "x") { ink.moveTo(-1, 7); ink.lineTo(7, -1); }
  if (kind === "x") { ink.moveTo(-1, -1); ink.lineTo(7, 7); }
  ink.stroke();
  if (kind === ".") ink.fillRect(2, 2, 1.4, 1.4);
  const pattern = pen.createPattern(tile, "repeat");
  hatchings.set(key, pattern);
  return pattern;
}

function inkOf(pen, style) {
  return style[1] ? makeHatching(pen, style[0], style[1]) : style[0];
}

function drawSample(canvas, style) {
  const [pen, width] = prepareCanvas(canvas, 14);
  pen.fillStyle = inkOf(pen, style);
  pen.fillRect(0, 0, width, 14);
}

// Rows: {who, phases: [names], shares: Uint8Array of bins x phases}
class Timeline {
  constructor(parent, styles, serverStyles) {
    this.styles = styles; this.serverStyles = serverStyles;
    this.rows = []; this.width_s = 1; this.bins = 0; this.cursor = null;
    this.legend = document.createElement("ul");
    this.legend.className = "legend";
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.readout = document.createElement("p");
    this.readout.className = "readout";
    this.readout.setAttribute("aria-live", "polite");
    this.note = document.createElement("p");
    this.note.className = "soft";
    parent.append(this.note, this.legend, this.canvas, this.readout);
    this.canvas.addEventListener("pointermove", e => this.pointAt(e));
    this.canvas.addEventListener("pointerleave", () => this.setCursor(null));
    this.canvas.addEventListener("blur", () => this.setCursor(null));
    this.canvas.addEventListener("keydown", e => this.handleKey(e));
    this.onChoose = null;
    this.canvas.addEventListener("click", e => { this.pointAt(e); if (this.onChoose && this.cursor) this.onChoose(this.rows[this.cursor.row].who); });
  }

  set(rows, bins, width_s, marks) {
    this.rows = rows; this.bins = bins; this.width_s = width_s; this.marks = marks;
    this.draw();
  }

  styleOf(row, phase) {
    return (row.who.startsWith("server-") ? this.serverStyles : this.styles)[phase] || ["#888888", ""];
  }

  drawLegend() {
    const used = new Map();
    for (const row of this.rows) row.phases.forEach((phase, p) => {
      if (row.totals[p] > 0) {
        const isServer = row.who.startsWith("server-");
        const style = this.styleOf(row, phase);
        const key = (isServer ? "server: " : "") + phase.replace("_", " ");
        if (!used.has(key)) used.set(key, style);
      }
    });
    const key = [...used.keys()].join();
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(...[...used].map(([name, style]) => {
      const item = document.createElement("li"), sample = document.createElement("canvas"), text = document.createElement("span");
      sample.style.width = "22px"; text.textContent = name;
      item.append(sample, text);
      requestAnimationFrame(() => drawSample(sample, style));
      return item;
    }));
  }

  draw() {
    const rows = this.rows;
    const rowHeight = rows.length > 40 ? 11 : rows.length > 12 ? 16 : 28;
    const height = Math.max(40, rows.length * rowHeight + 26);
    const [pen, width] = prepareCanvas(this.canvas, height);
    this.drawLegend();
    this.note.textContent = !rows.length ? "" : rowHeight - 1 <= THIN ? "Colours show the largest time category of each bin; hover over a bin for all of them." : "One row per process; the height of a colour is its fraction of the time.";
    if (!rows.length || !this.bins) {
      pen.fillStyle = theme("--soft");
      pen.fillText("no process has recorded time categories", 8, 22);
      this.canvas.setAttribute("aria-label", "Timeline: nothing yet");
      return;
    }
    this.canvas.setAttribute("aria-label", "Timeline of " + rows.length + " processes by time category. Arrow keys move in time and between processes, Enter chooses one.");
    const left = 74, right = 10, span = width - left - right;
    this.scale = { left, span, rowHeight };
    const column = span / this.bins;
    const bar = Math.max(2, rowHeight - (rowHeight > 10 ? 4 : 1));
    const every = rows.length > 40 ? 8 : rows.length > 12 ? 4 : 1;
    // Bins that are thinner than a pixel are drawn together.
    const together = Math.max(1, Math.ceil(0.9 / column));
    const areas = new Map();
    rows.forEach((row, i) => {
      const y = i * rowHeight + 1;
      if (i % every === 0 || row.who === this.chosen) {
        pen.fillStyle = row.who === this.chosen ? theme("--mark") : theme("--soft");
        pen.textAlign = "right"; pen.textBaseline = "middle";
        pen.fillText(row.who.replace("-", " "), left - 6, y + Math.max(5, bar / 2));
      }
      this.addAreas(areas, row, y, bar, together, x => left + x * column);
    });
    for (const { style, rects } of areas.values()) {
      pen.fillStyle = inkOf(pen, style);
      pen.beginPath();
      for (const [x, y, w, h] of rects) pen.rect(x, y, w, h);
      pen.fill();
    }
    const bottom = rows.length * rowHeight + 2;
    pen.textBaseline = "alphabetic"; pen.textAlign = "center"; pen.fillStyle = theme("--soft");
    const end = this.bins * this.width_s;
    for (const t of listTicks(0, end, Math.max(2, Math.floor(width / 120)))) {
      pen.fillText(formatClock(t), left + t / end * span, bottom + 16);
    }
    for (const mark of this.marks || []) {
      const x = left + mark.x / end * span;
      pen.strokeStyle = theme("--front"); pen.lineWidth = 1.5; pen.setLineDash([3, 2]);
      pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, bottom); pen.stroke(); pen.setLineDash([]);
    }
    if (this.cursor) {
      const { row, bin } = this.cursor;
      pen.strokeStyle = theme("--front"); pen.lineWidth = 2;
      pen.strokeRect(left + bin * column - 1, row * rowHeight, Math.max(column, 3) + 2, bar + 2);
      this.readout.textContent = this.describe(row, bin);
    } else {
      this.readout.textContent = "";
    }
  }

  // A bin's phases lie on top of each other in its row, as thick as their shares; neighbours that
  // look alike become one rectangle, and all rectangles of a phase are filled at once.
  addAreas(areas, row, y, bar, together, px) {
    const count = row.phases.length;
    const open = new Array(count).fill(null);
    const close = (p, rect) => {
      const style = this.styleOf(row, row.phases[p]), key = style.join();
      if (!areas.has(key)) areas.set(key, { style, rects: [] });
      areas.get(key).rects.push(rect);
    };
    const thin = bar <= THIN;
    for (let b = 0; b < this.bins; b += together) {
      const last = Math.min(this.bins, b + together);
      let total = (last - b) * 255, sum = 0;
      const sums = new Array(count).fill(0);
      for (let k = b; k < last; k++) for (let p = 0; p < count; p++) sums[p] += row.shares[k * count + p] || 0;
      for (const part of sums) sum += part;
      if (thin && sum) {
        // Too thin for shares: the whole bin in the colour of the phase that took the most of it.
        const most = sums.indexOf(Math.max(...sums));
        sums.fill(0); sums[most] = total = 1;
      } else {
        total = Math.max(total, sum);
      }
      const x0 = px(b), x1 = px(last);
      let seen = 0;
      for (let p = 0; p < count; p++) {
        const from = y + Math.round(bar * 2 * seen / total) / 2;
        seen += sums[p];
        const to = y + Math.round(bar * 2 * seen / total) / 2;
        const rect = open[p];
        if (rect && rect[1] === from && rect[3] === to - from) { rect[2] = x1 - rect[0]; continue; }
        if (rect) close(p, rect);
        open[p] = to > from ? [x0, from, x1 - x0, to - from] : null;
      }
    }
    open.forEach((rect, p) => { if (rect) close(p, rect); });
  }

  describe(index, bin) {
    const row = this.rows[index], count = row.phases.length;
    const parts = row.phases.map((phase, p) => [phase, row.shares[bin * count + p] || 0])
      .filter(([, share]) => share >= 3).sort((a, b) => b[1] - a[1])
      .map(([phase, share]) => phase.replace("_", " ") + " " + Math.round(share / 2.55) + "%");
    const t = bin * this.width_s;
    return row.who.replace("-", " ") + ", " + formatClock(t) + " to " + formatClock(t + this.width_s) + ": " + (parts.join(", ") || "nothing recorded");
  }

  setCursor(cursor) { this.cursor = cursor; this.draw(); }

  pointAt(event) {
    if (!this.scale) return;
    const row = Math.floor(event.offsetY / this.scale.rowHeight);
    const bin = Math.floor((event.offsetX - this.scale.left) / this.scale.span * this.bins);
    if (row < 0 || row >= this.rows.length) return this.setCursor(null);
    this.setCursor({ row, bin: Math.min(this.bins - 1, Math.max(0, bin)) });
  }

  handleKey(event) {
    if (!this.rows.length || !this.bins) return;
    const now = this.cursor || { row: 0, bin: this.bins - 1 };
    const step = Math.max(1, Math.round(this.bins / 60));
    const move = { ArrowLeft: [0, -step], ArrowRight: [0, step], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e9], End: [0, 1e9] }[event.key];
    if (event.key === "Enter" && this.cursor && this.onChoose) return this.onChoose(this.rows[now.row].who);
    if (!move) return;
    event.preventDefault();
    const clamp = (x, most) => Math.min(most, Math.max(0, x));
    this.setCursor(this.cursor ? { row: clamp(now.row + move[0], this.rows.length - 1), bin: clamp(now.bin + move[1], this.bins - 1) } : now);
  }
}
