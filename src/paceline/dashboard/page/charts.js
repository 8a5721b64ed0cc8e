// Line charts on a canvas: axes, bands, steps of time, a cursor for mouse and arrow keys.
const theme = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const DASHES = [[], [7, 4], [2, 3], [8, 3, 2, 3]];

function prepareCanvas(canvas, height) {
  const width = canvas.clientWidth || canvas.parentElement.clientWidth || 300;
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11.5px system-ui, sans-serif";
  return [pen, width];
}

function listTicks(low, high, most) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const raw = span / Math.max(1, most);
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map(k => k * power).find(s => s >= raw) || 10 * power;
  const ticks = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(k * step);
  return ticks;
}

function formatNumber(x) {
  if (x === null || x === undefined || !isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size >= 1e9) return trim(x / 1e9) + " G";
  if (size >= 1e6) return trim(x / 1e6) + " M";
  if (size >= 1e4) return trim(x / 1e3) + " k";
  return trim(x);
}
const trim = x => String(Number(x.toPrecision(3)));
const formatShare = x => x === null || x === undefined ? "–" : (100 * x).toFixed(x > 0.995 ? 1 : 2) + "%";
function formatBytes(x) {
  if (x === null || x === undefined) return "–";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (Math.abs(x) < 1000) return trim(x) + " " + unit;
    x /= 1000;
  }
  return trim(x) + " TB";
}
function formatDuration(s) {
  if (s === null || s === undefined || !isFinite(s)) return "–";
  if (s < 1) return trim(s) + " s";
  if (s < 10) return s.toFixed(1) + " s";
  s = Math.round(s);
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min " + String(s % 60).padStart(2, "0") + " s";
  return Math.floor(s / 3600) + " h " + String(Math.floor(s % 3600 / 60)).padStart(2, "0") + " min";
}
const formatClock = s => s < 120 ? trim(s) + " s" : s < 7200 ? trim(s / 60) + " min" : trim(s / 3600) + " h";

// A chart in a box: a heading, a canvas that takes the keyboard, a line that says what is under the cursor.
class Chart {
  constructor(parent, { title, height = 190, formatY = formatNumber, formatX = formatClock, zero = false, top = null }) {
    this.title = title; this.height = height; this.formatY = formatY; this.formatX = formatX;
    this.zero = zero; this.top = top; this.series = []; this.marks = []; this.cursor = null;
    this.box = document.createElement("div");
    const heading = document.createElement("h4");
    heading.textContent = title;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.style.height = height + "px";
    this.readout = document.createElement("p");
    this.readout.className = "readout";
    this.readout.setAttribute("aria-live", "polite");
    this.legend = document.createElement("ul");
    this.legend.className = "legend";
    this.box.append(heading, this.legend, this.canvas, this.readout);
    parent.append(this.box);
    this.canvas.addEventListener("pointermove", e => this.pointAt(e));
    this.canvas.addEventListener("pointerleave", () => this.setCursor(null));
    this.canvas.addEventListener("blur", () => this.setCursor(null));
    this.canvas.addEventListener("keydown", e => this.handleKey(e));
  }

  // series: {name, colour, dash, points: [[x, y]], band: [[x, low, high]], bold}
  set(series, marks = []) {
    this.series = series.filter(s => s.points.length);
    this.marks = marks;
    this.drawLegend();
    this.draw();
  }

  drawLegend() {
    const most = 8, shown = this.series.slice(0, most);
    const key = JSON.stringify(this.series.map(s => [s.name, s.colour, s.dash]));
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.legend.replaceChildren(...(this.series.length < 2 ? [] : shown).map(s => {
      const item = document.createElement("li"), sample = document.createElement("canvas"), text = document.createElement("span");
      text.textContent = s.name;
      item.append(sample, text);
      requestAnimationFrame(() => {
        const [pen, width] = prepareCanvas(sample, 12);
        pen.strokeStyle = s.colour; pen.lineWidth = s.bold === false ? 1.2 : 2.5; pen.setLineDash(DASHES[(s.dash || 0) % DASHES.length]);
        pen.beginPath(); pen.moveTo(0, 6); pen.lineTo(width, 6); pen.stroke();
      });
      return item;
    }));
    if (this.series.length > most) {
      const more = document.createElement("li");
      more.textContent = "and " + (this.series.length - most) + " more";
      this.legend.append(more);
    }
  }

  bounds() {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const s of this.series) {
      for (const [x, y] of s.points) if (y !== null) {
        x0 = Math.min(x0, x); x1 = Math.max(x1, x); y0 = Math.min(y0, y); y1 = Math.max(y1, y);
      }
      for (const [, low, high] of s.band || []) if (low !== null) {
        y0 = Math.min(y0, low); y1 = Math.max(y1, high);
      }
    }
    if (!isFinite(x0)) return null;
    if (this.zero) y0 = Math.min(0, y0);
    if (this.top !== null) y1 = Math.max(this.top, y1);
    if (y1 === y0) { y1 += Math.abs(y1) || 1; if (!this.zero) y0 -= Math.abs(y0) || 1; }
    const room = (y1 - y0) * 0.06;
    if (this.series.some(s => s.bars)) { x0 = Math.min(0, x0) - 0.5; x1 += 0.5; }
    return { x0: Math.min(0, x0), x1: x1 > x0 ? x1 : x0 + 1, y0: this.zero && y0 === 0 ? 0 : y0 - room, y1: y1 + room };
  }

  draw() {
    const [pen, width] = prepareCanvas(this.canvas, this.height);
    const b = this.bounds();
    const names = this.series.map(s => s.name).join(", ");
    this.canvas.setAttribute("aria-label", this.title + (b ? ": " + names + ". Arrow keys read values." : ": nothing yet"));
    if (!b) {
      pen.fillStyle = theme("--soft");
      pen.fillText("nothing recorded yet", 8, this.height / 2);
      return;
    }
    const left = 52, right = 10, upper = 8, lower = 20;
    const px = x => left + (x - b.x0) / (b.x1 - b.x0) * (width - left - right);
    const py = y => upper + (b.y1 - y) / (b.y1 - b.y0) * (this.height - upper - lower);
    this.scale = { px, b, left, right, width };
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    for (const y of listTicks(b.y0, b.y1, 4)) {
      pen.strokeStyle = theme("--grid");
      pen.beginPath(); pen.moveTo(left, py(y)); pen.lineTo(width - right, py(y)); pen.stroke();
      pen.fillStyle = theme("--soft"); pen.textAlign = "right";
      pen.fillText(this.formatY(y), left - 6, py(y));
    }
    pen.textBaseline = "alphabetic"; pen.textAlign = "center";
    for (const x of listTicks(b.x0, b.x1, Math.max(2, Math.floor(width / 110)))) {
      pen.fillStyle = theme("--soft");
      const label = this.formatX(x), half = pen.measureText(label).width / 2;
      pen.fillText(label, Math.min(width - half, Math.max(left + half - 10, px(x))), this.height - 5);
    }
    for (const mark of this.marks) if (mark.x >= b.x0 && mark.x <= b.x1) {
      pen.strokeStyle = theme("--soft"); pen.setLineDash([2, 3]);
      pen.beginPath(); pen.moveTo(px(mark.x), upper); pen.lineTo(px(mark.x), this.height - lower); pen.stroke();
      pen.setLineDash([]);
      pen.fillStyle = theme("--soft"); pen.save();
      pen.translate(px(mark.x) + 10, this.height - lower - 4); pen.rotate(-Math.PI / 2);
      pen.textAlign = "left"; pen.fillText(mark.text, 0, 0); pen.restore();
    }
    for (const s of this.series) {
      pen.fillStyle = s.colour; pen.strokeStyle = s.colour;
      if (s.band && s.band.length) {
        pen.globalAlpha = 0.22; pen.beginPath();
        const known = s.band.filter(p => p[1] !== null);
        known.forEach(([x, , high], i) => i ? pen.lineTo(px(x), py(high)) : pen.moveTo(px(x), py(high)));
        for (let i = known.length - 1; i >= 0; i--) pen.lineTo(px(known[i][0]), py(known[i][1]));
        pen.closePath(); pen.fill(); pen.globalAlpha = 1;
      }
      if (s.bars) {
        const wide = Math.max(3, Math.min(40, 0.7 * (px(1) - px(0))));
        for (const [x, y] of s.points) pen.fillRect(px(x) - wide / 2, py(y), wide, py(0) - py(y));
        continue;
      }
      pen.lineWidth = s.bold === false ? 1.2 : 2; pen.setLineDash(DASHES[(s.dash || 0) % DASHES.length]);
      pen.beginPath();
      let down = false;
      for (const [x, y] of s.points) {
        if (y === null) { down = false; continue; }
        if (down) pen.lineTo(px(x), py(y)); else pen.moveTo(px(x), py(y));
        down = true;
      }
      pen.stroke(); pen.setLineDash([]);
      if (s.points.length < 40 || s.dots) for (const [x, y] of s.points) if (y !== null) {
        pen.beginPath(); pen.arc(px(x), py(y), 2.6, 0, 7); pen.fill();
      }
    }
    if (this.cursor !== null) {
      const x = Math.min(b.x1, Math.max(b.x0, this.cursor));
      pen.strokeStyle = theme("--front"); pen.lineWidth = 1;
      pen.beginPath(); pen.moveTo(px(x), upper); pen.lineTo(px(x), this.height - lower); pen.stroke();
      this.readout.textContent = this.formatX(x) + ": " + this.series.map(s => s.name + " " + this.formatY(this.valueAt(s, x))).join("; ");
    } else {
      this.readout.textContent = "";
    }
  }

  valueAt(s, x) {
    let best = null, distance = Infinity;
    for (const [px, y] of s.points) if (y !== null && Math.abs(px - x) < distance) { distance = Math.abs(px - x); best = y; }
    return best;
  }

  setCursor(x) { this.cursor = x; this.draw(); }

  pointAt(event) {
    if (!this.scale) return;
    const { b, left, right, width } = this.scale;
    const at = (event.offsetX - left) / (width - left - right);
    this.setCursor(b.x0 + Math.min(1, Math.max(0, at)) * (b.x1 - b.x0));
  }

  handleKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (step === undefined || !this.scale) return;
    event.preventDefault();
    const { b } = this.scale;
    const from = this.cursor === null ? (step < 0 ? b.x1 : b.x0) : this.cursor;
    this.setCursor(Math.min(b.x1, Math.max(b.x0, from + step * (b.x1 - b.x0) / 40)));
  }
}
