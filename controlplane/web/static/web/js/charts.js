"use strict";
// <figure class="chart" data-src="/series/…" data-chart="latency">: figures with one source share
// one fetch and one cursor. Null is a gap. Colours are read from tokens; a theme change redraws. With
// the focus a chart is a slider over time: arrows, Home and End read it, Escape goes back to now.
(() => {
  const HEIGHT = 180, LABEL = 13; // px; a label's height
  const root = document.documentElement;
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  const paint = (name) => { probe.style.color = `var(${name})`; return getComputedStyle(probe).color; };
  const thin = (text) => text.replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f").replace("-", "\u2212");
  const number = (value) => {
    const size = Math.abs(value);
    const text = value.toFixed(Number.isInteger(value) || size >= 100 ? 0 : size >= 10 ? 1 : 2).split(".");
    return thin(text[0]) + (text[1] ? "." + text[1] : "");
  };
  const say = (value, unit) => {
    if (value == null) return "–";
    if (unit === "s" && value === 0) return "0\u00a0s";
    if (unit === "s") return value < 0.9995 ? number(value * 1000) + "\u00a0ms" : number(value) + "\u00a0s";
    return number(value) + (unit ? "\u00a0" + unit : "");
  };
  const utc = (seconds, long) => new Date(seconds * 1e3).toISOString().slice(11, long ? 19 : 16);

  class Chart {
    constructor(figure, data) {
      this.figure = figure;
      this.out = figure.querySelector(".readout");
      this.box = figure.querySelector(".plot");
      this.set(data);
      addEventListener("theme", () => this.draw());
      this.box.addEventListener("keydown", (event) => this.key(event));
      this.box.addEventListener("blur", () => this.release());
      new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.box.clientWidth, height: HEIGHT })).observe(this.box);
    }
    set(data) {
      this.data = data;
      this.spec = data.charts[this.figure.dataset.chart];
      this.box.classList.remove("busy");
      const same = this.plot && this.plot.series.length === this.spec.lines.length + 1;
      if (same) { this.plot.setData(this.columns()); this.read(null); } else this.draw();
    }
    columns() { return [this.data.x, ...this.spec.lines.map((line) => line.values)]; }
    draw() {
      if (this.plot) this.plot.destroy();
      this.plot = this.held = null;
      this.box.replaceChildren();
      const drawn = this.spec.lines.some((line) => line.values.some((value) => value != null));
      this.box.setAttribute("role", drawn ? "slider" : "img");
      this.box.tabIndex = drawn ? 0 : -1;
      this.box.setAttribute("aria-description", drawn ? this.figure.dataset.keys : "");
      if (!drawn) {
        const note = document.createElement("p");
        note.className = "say";
        note.textContent = this.figure.dataset.empty;
        this.box.append(note);
        this.out.replaceChildren();
        for (const name of ["valuenow", "valuemin", "valuemax", "valuetext"]) this.box.removeAttribute("aria-" + name);
        return;
      }
      const ink = paint("--muted"), line = paint("--line"), font = "12px " + getComputedStyle(document.body).fontFamily;
      const grid = { stroke: line, width: 1 }, axis = { stroke: ink, grid, ticks: { show: false }, font, gap: 6 };
      const dash = { dash: [6, 4], dot: [2, 3] };
      this.plot = new uPlot({
        width: this.box.clientWidth, height: HEIGHT, legend: { show: false }, padding: [14, this.margin(font), 0, 0],
        cursor: { sync: { key: "page" }, drag: { x: true, y: false }, points: { size: 6 } },
        scales: { y: { range: (_, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, size: 26, space: 64, values: (_, times) => times.map((time) => utc(time, false)) },
          { ...axis, size: 58, space: 34, values: (_, values) => values.map((value) => say(value, this.spec.unit)) },
        ],
        series: [{}, ...this.spec.lines.map((one, index) => ({
          stroke: paint(`--c${index + 1}`), width: 1.5, dash: dash[one.style], spanGaps: false,
          paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
          points: { show: (plot, id, from, to) => to - from < 3, size: 4 } }))],
        hooks: { setCursor: [(plot) => this.read(plot.cursor.idx)], draw: [(plot) => this.mark(plot), (plot) => this.name(plot, font)] },
      }, this.columns(), this.box);
      this.read(null);
    }
    range(low, high) {
      const bound = this.spec.bound;
      const shown = bound != null && bound < (high || 0) * 4 + 1e-9 ? bound : 0;
      const least = this.spec.unit === "s" ? 1e-3 : 1; // of nothing but zeros: ticks that differ
      return [Math.min(0, low ?? 0), Math.max((high || 0), shown, least) * 1.08];
    }
    mark(plot) {
      const { ctx, bbox } = plot, ratio = devicePixelRatio;
      ctx.save();
      const rule = (x1, y1, x2, y2) => { ctx.beginPath(); ctx.moveTo(x1, y1); ctx.lineTo(x2, y2); ctx.stroke(); };
      if (this.spec.bound != null && this.spec.bound <= plot.scales.y.max) {
        const y = plot.valToPos(this.spec.bound, "y", true);
        ctx.strokeStyle = paint("--bad"); ctx.lineWidth = ratio; ctx.setLineDash([2 * ratio, 3 * ratio]);
        rule(bbox.left, y, bbox.left + bbox.width, y);
      }
      ctx.setLineDash([]); ctx.lineWidth = ratio;
      for (const mark of this.data.marks) {
        if (mark.at < plot.scales.x.min || mark.at > plot.scales.x.max) continue;
        const x = plot.valToPos(mark.at, "x", true), action = mark.kind !== "incident";
        ctx.strokeStyle = ctx.fillStyle = paint(action ? "--act" : "--bad");
        rule(x, bbox.top, x, bbox.top + bbox.height);
        // The action's ◆ (its undo's ◇) stands right of its line, the incident's ■ left: they often come together.
        const size = 8 * ratio, top = bbox.top - size - 2 * ratio;
        ctx.beginPath();
        if (action) {
          ctx.moveTo(x + size / 2, top); ctx.lineTo(x + size, top + size / 2);
          ctx.lineTo(x + size / 2, top + size); ctx.lineTo(x, top + size / 2);
          ctx.closePath();
        } else ctx.rect(x - size, top, size - ratio, size - ratio);
        if (mark.kind === "undo") ctx.stroke(); else ctx.fill();
      }
      ctx.restore();
    }
    // Each line's name stands at its end, so that no one has to tell colours apart; a line alone needs none.
    margin(font) {
      const ctx = document.createElement("canvas").getContext("2d");
      ctx.font = font;
      const { lines } = this.spec;
      return lines.length < 2 ? 18 : 10 + Math.max(...lines.map((line) => ctx.measureText(line.label).width));
    }
    name(plot, font) {
      const { ctx, bbox } = plot, ratio = devicePixelRatio, { lines } = this.spec;
      const names = lines.length < 2 ? [] : lines.flatMap((line, i) => {
        const at = line.values.findLastIndex((value) => value != null);
        if (at < 0) return [];
        return { text: line.label, colour: paint(`--c${i + 1}`), x: plot.valToPos(this.data.x[at], "x", true), y: plot.valToPos(line.values[at], "y", true) };
      }).sort((one, other) => other.y - one.y);
      ctx.save();
      ctx.font = font.replace("12px", `${12 * ratio}px`);
      ctx.textAlign = "left"; ctx.textBaseline = "middle";
      let lowest = bbox.top + bbox.height; // the lowest first: those above make room
      for (const { text, colour, x, y } of names) {
        lowest = Math.min(y, lowest) - LABEL * ratio;
        ctx.fillStyle = colour;
        ctx.fillText(text, x + 6 * ratio, lowest + LABEL * ratio);
      }
      ctx.restore();
    }
    newest() { return Math.max(0, ...this.data.x.keys().filter((i) => this.spec.lines.some((line) => line.values[i] != null))); }
    key(event) {
      if (!this.plot || event.metaKey || event.ctrlKey || event.altKey) return;
      if (event.key === "Escape") return this.release();
      const { x } = this.data, last = x.length - 1, at = this.held == null ? this.newest() : x.indexOf(this.held);
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at + 10, PageDown: at - 10, Home: 0, End: last }[event.key];
      if (to == null) return;
      event.preventDefault();
      this.hold(Math.min(Math.max(to, 0), last));
    }
    hold(index) {
      this.held = this.data.x[index];
      const value = this.spec.lines.map((line) => line.values[index]).find((each) => each != null);
      const top = value == null ? HEIGHT / 2 : this.plot.valToPos(value, "y");
      this.plot.setCursor({ left: this.plot.valToPos(this.held, "x"), top }, true, true);
    }
    // New data came: the time that a key chose stays, unless it is out of range.
    keep() {
      const index = this.data.x.indexOf(this.held);
      if (index < 0) this.release(); else this.hold(index);
    }
    release() {
      if (this.held == null) return;
      this.held = null;
      this.plot.setCursor({ left: -10, top: -10 }, true, true);
    }
    read(index) {
      const { x } = this.data;
      // Away from the cursor: the newest window in which anything was measured.
      const at = index ?? this.newest();
      const item = (kind, text, value, style) => {
        const span = document.createElement("span"), mark = document.createElement("i"), b = document.createElement("b");
        span.className = kind; mark.className = style || ""; b.textContent = value;
        span.append(mark, text + " ", b);
        return span;
      };
      const time = document.createElement("span");
      time.textContent = utc(x[at], true);
      const items = this.spec.lines.map((one, i) => item(`c${i + 1}`, one.label, say(one.values[at], this.spec.unit), one.style));
      if (this.spec.bound != null) items.push(item("bound", this.spec.bound_label, say(this.spec.bound, this.spec.unit), "dot"));
      const near = this.data.marks.filter((mark) => index != null && Math.abs(mark.at - x[at]) <= this.data.step_s / 2);
      for (const mark of near) items.push(Object.assign(document.createElement("span"), { textContent: ({ action: "◆ ", undo: "◇ " }[mark.kind] ?? "■ ") + mark.label }));
      this.out.replaceChildren(time, ...items);
      const said = [...this.out.children].map((each) => each.textContent).join(", ");
      for (const [name, value] of Object.entries({ valuemin: 0, valuemax: x.length - 1, valuenow: at, valuetext: said }))
        this.box.setAttribute("aria-" + name, value);
    }
  }

  // All charts of one source.
  class Source {
    constructor(address, figures) {
      this.address = address; this.figures = figures; this.charts = [];
      this.load();
      document.body.addEventListener("changed:charts", () => this.load());
      for (const part of ["incidents", "actions"]) document.body.addEventListener("changed:" + part, () => this.later());
      document.body.addEventListener("point", (event) => this.add(event.detail));
    }
    later() { clearTimeout(this.timer); this.timer = setTimeout(() => this.load(), 500); }
    async load() {
      const slow = setTimeout(() => this.figures.forEach((f) => f.querySelector(".plot").classList.add("busy")), 300);
      try {
        const answer = await fetch(this.address, { headers: { Accept: "application/json" } });
        if (!answer.ok) throw new Error(String(answer.status));
        this.data = await answer.json();
        if (this.charts.length) this.show();
        else this.charts = this.figures.map((figure) => new Chart(figure, this.data));
      } catch (error) {
        for (const figure of this.figures) {
          if (this.charts.length) break; // the last picture stays; it tells its own time
          const note = Object.assign(document.createElement("p"), { className: "say" });
          note.textContent = figure.dataset.failed;
          figure.querySelector(".plot").replaceChildren(note);
        }
      } finally {
        clearTimeout(slow);
        this.figures.forEach((f) => f.querySelector(".plot").classList.remove("busy"));
      }
    }
    add(point) {
      if (!this.data || point.objective !== this.data.objective) return;
      if (point.step_s !== this.data.step_s) return this.later(); // a wider range: windows are summed on the server
      // A window is judged some seconds after it ended, so its place is often there already, empty.
      const { x, charts } = this.data;
      const lines = Object.entries(charts).flatMap(([key, spec]) => spec.lines.map((line, i) => [line, point.values[key][i]]));
      let at = x.indexOf(point.at);
      if (at < 0) {
        if (point.at < x.at(-1)) return;
        for (let end = x.at(-1) + point.step_s; end <= point.at; end += point.step_s) {
          x.push(end);
          lines.forEach(([line]) => line.values.push(null));
        }
        at = x.length - 1;
        while (x[0] < x[at] - this.data.minutes * 60) {
          x.shift(); at -= 1;
          lines.forEach(([line]) => line.values.shift());
        }
      }
      lines.forEach(([line, value]) => { line.values[at] = value; });
      this.show();
    }
    show() {
      this.charts.forEach((chart) => chart.set(this.data));
      // uPlot draws in a microtask of its own.
      queueMicrotask(() => this.charts.find((chart) => chart.held != null)?.keep());
    }
  }

  const found = new Map();
  for (const figure of document.querySelectorAll("figure.chart[data-src]")) {
    const address = figure.dataset.src;
    found.set(address, [...(found.get(address) || []), figure]);
  }
  for (const [address, figures] of found) new Source(address, figures);
})();
