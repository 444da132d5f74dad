// Measures by depth: one panel a residual, the others behind it in grey.

const MEASURES = [
  ["output", "Output magnitude", "RMS of each sublayer's output, before it is added or stored.", "output RMS"],
  ["read", "Read magnitude", "RMS of what each read returned, before its norm; the square is the final read.", "read RMS"],
  ["gradient", "Gradient norm", "Norm of the gradient of each sublayer's parameters.", "gradient norm"],
  ["entropy", "Entropy of the depth weights", "How widely each read spreads its weights; the dotted line is an even spread over everything before it.", "entropy, nats"],
  ["experts", "Uneven load of the experts", "How much the tokens that experts get differ in a layer: standard deviation over mean; 0 where all get the same.", "load, std / mean"],
];

function drawMeasures() {
  if (!deep.length) return empty(host("measures"), "No depth records: norms, gradients and entropy were not recorded.");
  for (const [key, title, words, unit] of MEASURES) {
    const all = deep.filter((group) => group.depth.frames.some((frame) => frame[key] && known(frame[key]).length));
    if (key === "experts" && !all.length) continue;  // most models have none
    const figure = host(`measure-${key}`) || host("measures").appendChild(makeMeasure(key, title, words));
    const positive = all.flatMap((group) => group.depth.frames.flatMap((frame) => known(frame[key] || []))).filter((value) => value > 0);
    const panels = figure.querySelector(".grid"), shown = all.filter(visible);
    if (!positive.length) { empty(panels, "Not recorded."); continue; }
    const domain = extent(positive), log = scaleOf(key, domain, figure) === "log", y = log ? [domain[0] / 1.15, domain[1] * 1.15] : [0, domain[1] * 1.06];
    const hosts = shown.map((group) => [group, make("div", { class: "chart" })]);
    panels.replaceChildren(...hosts.map(([group, chart]) => make("div", { class: "panel" }, panelTitle(group), chart)));
    for (const [group, chart] of hosts) drawMeasure(chart, group, shown, key, unit, y, log);
  }
}
function makeMeasure(key, title, words) {
  const caption = make("figcaption", {}, make("h3", {}, title), make("div", { class: "tools" }, make("span", { class: "save", "data-save": `measure-${key}` })), make("p", {}, words));
  return make("figure", { id: `measure-${key}` }, caption, make("div", { class: "grid" }));
}
function scaleOf(key, domain, figure) {
  if (key === "entropy") return "linear";
  if (!state.log[key]) {
    state.log[key] = domain[1] / domain[0] > 30 ? "log" : "linear";
    figure.querySelector(".tools").prepend(choice(`scale-${key}`, "", [["linear", "linear"], ["log", "log"]], () => state.log[key], (value) => { state.log[key] = value; drawMeasures(); }));
  }
  return state.log[key];
}

function drawMeasure(where, group, all, key, unit, y, log) {
  const values = frameOf(group)[key] || [], count = group.depth.kinds.length, longest = Math.max(...all.map((other) => other.depth.kinds.length));
  const { svg, X, Y, box } = axes(where, {
    height: 210, x: [-0.5, longest + 0.5], y, yLog: log, yTitle: unit, xTitle: "sublayer", label: `${unit} by sublayer of ${group.label}${log ? ", log scale" : ""}`,
    xTicks: (room) => linearTicks(0, longest - 1, Math.max(1, Math.min(longest - 1, Math.floor(room / 42)))).filter((tick) => Number.isInteger(tick.value)),
  });
  const usable = (value) => (value === null || value === undefined || (log && value <= 0) ? null : value);
  const lines = (other, style) => {
    const numbers = frameOf(other)[key] || [];
    for (const kind of new Set(other.depth.kinds)) {
      const at = [...other.depth.kinds.keys()].filter((i) => other.depth.kinds[i] === kind);
      svg.append(make("path", { class: `line depth-line ${style}`, d: path(at, at.map((i) => usable(numbers[i])), X, Y) }));
    }
  };
  for (const other of all) if (other !== group) lines(other, "ghost");
  if (key === "entropy") {
    const reads = [...Array(count + 1).keys()], even = (read) => Math.log(read + 1);  // nats, as the records are
    svg.append(make("path", { class: "line reference", d: path(reads, reads.map((read) => (even(read) <= y[1] ? even(read) : null)), X, Y) }));
  }
  lines(group, group.look);
  const radius = clamp((X(1) - X(0)) * 0.34, 1.1, 3);
  values.forEach((value, i) => {
    if (usable(value) === null) return;
    if (i < count) svg.append(make("circle", { class: `dot ${group.look}${hollow(group.depth.kinds[i])}`, cx: X(i), cy: Y(value), r: radius }));
    else svg.append(make("rect", { class: `dot ${group.look}`, x: X(i) - 3, y: Y(value) - 3, width: 6, height: 6 }));
  });
  if (!values.length) return;
  explore(svg, {
    topic: "depth",
    locate: (px) => ({ read: clamp(Math.round((px - X(0)) / (X(1) - X(0))), 0, values.length - 1), source: null }),
    move: (point, dx) => ({ read: clamp((point?.read ?? -1) + dx, 0, values.length - 1), source: null }),
    marks: ({ read }) => (read < values.length ? [make("line", { class: "cursor", x1: X(read), x2: X(read), y1: box.top, y2: box.bottom })] : []),
    show: ({ read }) => ({
      title: read < count ? (values.length > count ? readName(group, read) : `Sublayer ${read}, ${group.depth.kinds[read]}`) : "Final read", at: [X(read), box.top + 60],
      lines: all.map((other) => ({ key: swatch(other), name: other.label, value: short((frameOf(other)[key] || [])[read] ?? null), near: other === group })),
    }),
  });
}
