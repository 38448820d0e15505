// The server's past as small charts: points of the last 15 minutes or 24 hours, which the server keeps.
import { roundUp, span, tick } from "./axes.js";
import { h, number, seconds } from "./dom.js";
import { ask } from "./server.js";

const SPANS = { "15m": ["15 min", 900, 3], "24h": ["24 h", 86400, 4] }; // words, seconds, parts of the time axis
const EVERY = 5000; // milliseconds between two looks
const [HEIGHT, TOP, FLOOR, LEFT, RIGHT] = [92, 6, 76, 42, 6];
const percent = (share) => `${Math.round(100 * share)} %`;
const CHARTS = [ // title, unit, format, lines of [column, colour, words]
  { title: "Tokens per second", format: number, lines: [["generated", "decode", "generated"], ["computed", "prefill", "of prompts"]] },
  { title: "Requests", format: number, lines: [["running", "decode", "running"], ["waiting", "warn", "waiting"]] },
  { title: "Time to first token", format: seconds, lines: [["ttft_p50", "decode", "p50"], ["ttft_p99", "group2", "p99"]] },
  { title: "Between tokens", format: seconds, lines: [["gap_p99", "group2", "p99"]] },
  { title: "KV blocks in use", format: percent, most: 1, lines: [["kv_usage", "decode", "owned"]] },
  { title: "Refused requests", format: number, bars: true, lines: [["refused", "bad", "refused"]] },
];

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export class Charts {
  // `onLook(answer)` gets each answer of the server: what is served, and the points.
  constructor(root, onLook) {
    this.onLook = onLook;
    this.span = "15m";
    this.model = null;
    this.pointed = null; // index of the point under the pointer
    this.buttons = Object.entries(SPANS).map(([name, [words]]) => h("button", { "data-span": name, onclick: () => this.choose(name) }, words));
    this.models = h("select", { ariaLabel: "Model of the charts", hidden: true, onchange: () => { this.model = this.models.value; this.draw(); } });
    this.when = h("span.where");
    this.charts = CHARTS.map((chart) => {
      const values = chart.lines.map(([, colour, words]) => ({ words, element: h("b"), key: h("span.key", {}, h(`i.${colour}`)) }));
      const plot = svg("svg", { class: "plot", role: "img", height: HEIGHT });
      plot.addEventListener("pointermove", (event) => this.point(event.offsetX, plot.clientWidth));
      plot.addEventListener("pointerleave", () => this.point(null));
      const heads = values.map(({ words, element, key }) => { key.append(h("span", {}, `${words} `, element)); return key; });
      return { ...chart, values, plot, figure: h("figure.chart", {}, h("figcaption", {}, h("span.title", {}, chart.title), h("span.keys", {}, ...heads)), plot) };
    });
    this.panel = h("div.panel", { hidden: true },
      h("div.bar", {}, h("h2", {}, "Over time"), ...this.buttons, this.models, h("span.spacer"), this.when), h("div.charts", {}, ...this.charts.map(({ figure }) => figure)));
    root.append(this.panel);
    new ResizeObserver(() => this.draw()).observe(this.panel);
    this.choose(this.span);
  }

  async follow(signal) {
    this.signal = signal;
    while (!signal.aborted && await this.look()) {
      await new Promise((done) => setTimeout(done, EVERY));
    }
  }

  // Returns false for a key that the server does not take: asking again would only fill its log.
  async look() {
    try {
      const asked = this.span;
      const answer = await (await ask(`dashboard/history?span=${asked}`, { kind: "admin", signal: this.signal })).json();
      if (this.signal?.aborted || asked !== this.span) return true;
      this.answer = answer;
      this.onLook(answer);
      this.draw();
    } catch (error) { // the page says what is wrong with the server
      return error.status !== 401;
    }
    return true;
  }

  choose(name) {
    this.span = name;
    for (const button of this.buttons) button.setAttribute("aria-pressed", button.dataset.span === name);
    if (this.signal) this.look();
  }

  point(x, width) {
    const ages = this.columns?.age ?? [];
    const age = x === null ? null : (1 - (x - LEFT) / (width - LEFT - RIGHT)) * SPANS[this.span][1];
    const nearest = ages.reduce((best, each, index) => (Math.abs(each - age) < Math.abs(ages[best] - age) ? index : best), 0);
    this.pointed = age === null || !ages.length || Math.abs(ages[nearest] - age) > 2 * this.answer.point_seconds ? null : nearest;
    this.draw();
  }

  get columns() { return this.answer?.series[this.model]; }

  draw() {
    if (!this.answer) return;
    const names = Object.keys(this.answer.series);
    if (!names.includes(this.model)) this.model = names[0];
    this.panel.hidden = !names.length;
    if (!names.length) return;
    this.models.hidden = names.length < 2;
    if (this.models.options.length !== names.length || [...this.models.options].some((option, index) => option.value !== names[index])) {
      this.models.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    }
    this.models.value = this.model;
    const index = this.pointed ?? this.columns.age.length - 1;
    const age = this.columns.age[index];
    this.when.textContent = this.pointed === null ? "" : `${span(age)} ago, ${new Date(Date.now() - 1000 * age).toLocaleTimeString()}`;
    for (const chart of this.charts) this.drawChart(chart, index);
  }

  drawChart(chart, index) {
    const { columns, answer } = this;
    const { plot, format, lines, values } = chart;
    const [, length, parts] = SPANS[this.span];
    const width = plot.clientWidth || 300;
    const column = (name) => (name === "refused" ? columns.refused.map((reasons) => Object.values(reasons).reduce((sum, count) => sum + count, 0)) : columns[name]);
    const most = chart.most ?? roundUp(Math.max(...lines.flatMap(([name]) => column(name).map((value) => value ?? 0)), format === seconds ? 0.01 : 1));
    const x = (age) => LEFT + (1 - age / length) * (width - LEFT - RIGHT);
    const y = (value) => FLOOR - (value / most) * (FLOOR - TOP);
    const text = (words, at, top, anchor) => svg("text", { x: at, y: top, "text-anchor": anchor }, words);
    const parts_ = Array.from({ length: parts + 1 }, (_, part) => (length * part) / parts);
    const shapes = [
      svg("path", { class: "grid", d: [0, 0.5, 1].map((share) => `M${LEFT} ${y(share * most)}H${width - RIGHT}`).join("") }),
      text(format === seconds ? tick(most) : format(most), LEFT - 5, TOP + 4, "end"), text("0", LEFT - 5, FLOOR + 3, "end"),
      ...parts_.map((age) => text(age ? `−${span(age)}` : "now", x(age), HEIGHT - 3, age === length ? "start" : age ? "middle" : "end")),
    ];
    lines.forEach(([name, colour, words], each) => {
      const found = column(name);
      shapes.push(svg("path", { class: `line ${chart.bars ? "bars" : ""} ${colour}`, d: path(found, columns.age, answer.point_seconds, x, y, chart.bars) }));
      const value = found[index];
      const reasons = name === "refused" ? Object.keys(columns.refused[index] ?? {}).map((reason) => reason.replaceAll("_", " ")) : [];
      values[each].element.textContent = [value === null || value === undefined ? "–" : format(value), ...reasons].join(" ");
      values[each].key.title = words;
    });
    if (this.pointed !== null) shapes.push(svg("path", { class: "pointed", d: `M${x(columns.age[index])} ${TOP}V${FLOOR}` }));
    plot.setAttribute("aria-label", `${chart.title}: ${lines.map(([name, , words], each) => `${words} ${values[each].element.textContent} now, ${format(Math.max(0, ...column(name).map((value) => value ?? 0)))} at most in the last ${SPANS[this.span][0]}`).join("; ")}`);
    plot.replaceChildren(...shapes);
  }
}

// A line that ends where there is no value; a lone value is a dash. Bars stand on the floor.
function path(values, ages, step, x, y, bars) {
  let d = "";
  let last = null;
  values.forEach((value, index) => {
    if (value === null || value === undefined) { last = null; return; }
    const [at, height] = [x(ages[index]).toFixed(1), y(value).toFixed(1)];
    if (bars) d += value ? `M${at} ${y(0)}V${height}` : "";
    else d += last !== null && last - ages[index] < 2.5 * step ? `L${at} ${height}` : `M${at} ${height}m-1.2 0h2.4m-1.2 0`;
    last = ages[index];
  });
  return d;
}
