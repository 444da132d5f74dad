// Loss: curves by tokens, or, where there was one evaluation only, a dot for each seed.

const curvesOf = (group, kind) => (kind === "difference" && group.baseline ? [] : group.curves[kind].runs);
const lastOf = (curve) => known(curve.y).at(-1) ?? null;

function drawCurves(kind, title, height, nothing) {
  const where = host(kind), all = groups.filter((group) => curvesOf(group, kind).some((run) => known(run.y).length));
  if (!all.length) return empty(where, nothing);
  const shown = all.filter(visible);
  if (all.every((group) => curvesOf(group, kind).every((run) => known(run.y).length < 2))) return drawDots(where, kind, title, all, shown);
  const end = Math.max(1, ...all.flatMap((group) => curvesOf(group, kind).map((run) => run.x.at(-1))));
  const from = { all: 0, half: end / 2, tenth: end * 0.9 }[state.range];
  const lines = shown.flatMap((group) => curvesOf(group, kind).concat(group.curves[kind].mean));
  const values = lines.flatMap((line) => known(line.y.filter((_, i) => line.x[i] >= from))).concat(kind === "difference" ? 0 : []);
  const [low, high] = values.length ? extent(values) : [0, 1], pad = (high - low) * 0.05 || 0.05, [size, unit] = unitOf(end);
  const named = kind === "eval" && where.clientWidth > 640 && shown.length * 14 < height - 64;
  const longest = Math.max(0, ...shown.map((group) => cut(group.label).length));
  const ends = shown.map((group) => `${group.label} ends at ${loss(lastOf(group.curves[kind].mean))}`).join("; ");
  const chart = axes(where, {
    height, x: [from, end], y: [low - pad, high + pad], yTitle: title, xTitle: `${unit}tokens`, margin: named ? 22 + 7.3 * longest : 10,
    label: `${title} by tokens, means over seeds. ${ends}.`,
    xTicks: (room) => linearTicks(from / size, end / size, clamp(Math.round(room / 75), 2, 10)).map((tick) => ({ value: tick.value * size, label: tick.label })),
  });
  const { svg, X, Y, box } = chart;
  if (kind === "difference") svg.append(make("line", { class: "zero", x1: box.left, x2: box.right, y1: Y(0), y2: Y(0) }));
  for (const group of shown) {
    const { runs, mean } = group.curves[kind], crowd = shown.length > CROWD ? " crowd" : "";
    if (runs.length > 1) for (const run of runs) svg.append(make("path", arm(group, `line thin${crowd}`, { d: path(run.x, run.y, X, Y, from) })));
    svg.append(make("path", arm(group, "line mean", { d: path(mean.x, mean.y, X, Y, from) })));
  }
  if (named) nameEnds(chart, shown.filter((group) => lastOf(group.curves[kind].mean) !== null));
  exploreCurves(chart, kind, shown, end, from);
}

const cut = (name) => (name.length > 24 ? `${name.slice(0, 23)}…` : name);
function nameEnds({ svg, Y, box }, shown) {
  const labels = shown.map((group) => ({ group, from: Y(lastOf(group.curves.eval.mean)) })).sort((a, b) => a.from - b.from);
  labels.forEach((label, i) => { label.at = Math.max(label.from, i ? labels[i - 1].at + 14 : box.top); });
  labels.reverse().forEach((label, i) => { label.at = Math.min(label.at, i ? labels[i - 1].at - 14 : box.bottom - 4); });
  for (const { group, from, at } of labels) {
    svg.append(make("path", arm(group, "leader", { d: `M${box.right + 1},${from}L${box.right + 14},${at}` })));
    svg.append(make("text", arm(group, "ending", { x: box.right + 18, y: at + 4 }), cut(group.label)));
  }
}

function exploreCurves({ svg, X, Y, box }, kind, shown, end, from) {
  const xs = [...new Set(shown.flatMap((group) => group.curves[kind].mean.x))].filter((x) => x >= from).sort((a, b) => a - b);
  if (!xs.length) return;
  const there = (tokens) => shown.flatMap((group) => {
    const { mean, runs } = group.curves[kind], j = nearest(mean.x, tokens);
    if (!mean.x.length || Math.abs(mean.x[j] - tokens) > end / 20) return [];
    return [{ group, x: mean.x[j], value: mean.y[j] ?? null, seeds: known(runs.map((run) => run.y[nearest(run.x, mean.x[j])])) }];
  }).sort((a, b) => (a.value ?? Infinity) - (b.value ?? Infinity));
  const closest = (tokens, py) => {
    const found = there(tokens).filter(({ value }) => value !== null);
    return found.length ? found[nearest(found.map(({ value }) => Y(value)), py)].group : null;
  };
  explore(svg, {
    topic: "tokens",
    locate: (px, py) => { const tokens = xs[nearest(xs.map(X), px)]; return { tokens, group: closest(tokens, py) }; },
    move: (point, dx, dy) => {
      const tokens = xs[clamp((point ? nearest(xs, point.tokens) : xs.length - (dx ? 0 : 1)) + dx, 0, xs.length - 1)], order = there(tokens);
      const row = clamp((point ? order.findIndex(({ group }) => group === point.group) : -1) + dy, 0, order.length - 1);
      return { tokens, group: order[row]?.group ?? null };
    },
    marks: ({ tokens, group: chosen }) => {
      const x = xs[nearest(xs, tokens)];
      if (Math.abs(x - tokens) > end / 20) return [];
      const dots = there(x).filter(({ value }) => value !== null);
      return [make("line", { class: "cursor", x1: X(x), x2: X(x), y1: box.top, y2: box.bottom }),
        ...dots.map(({ group, x: at, value }) => make("circle", { class: `dot ${group.look}`, cx: X(at), cy: Y(value), r: group === chosen ? 5 : 3.5 }))];
    },
    show: ({ tokens, group: chosen }) => {
      if (shown.length > CROWD) light(chosen);
      const write = kind === "difference" ? signed : loss;
      const range = (seeds) => (seeds.length > 1 ? ` (${write(Math.min(...seeds))} to ${write(Math.max(...seeds))})` : "");
      const lines = there(tokens).map(({ group, value, seeds }) =>
        ({ key: swatch(group), name: group.label, value: (value === null ? "—" : write(value)) + range(seeds), near: group === chosen }));
      return { title: `${many(tokens)} tokens`, lines, at: [X(tokens), box.top + 70] };
    },
  });
}

function drawDots(where, kind, title, all, shown) {
  const rowsOf = shown.map((group) => ({ group, runs: curvesOf(group, kind).filter((run) => lastOf(run) !== null) }));
  const values = rowsOf.flatMap(({ runs }) => runs.map(lastOf)).concat(kind === "difference" ? 0 : []);
  const [low, high] = values.length ? extent(values) : [0, 1], pad = (high - low) * 0.08 || 0.05;
  const tokens = curvesOf(all[0], kind)[0].x.at(-1), step = 40, height = 64 + step * Math.max(1, rowsOf.length);
  const means = rowsOf.map(({ group, runs }) => ({ group, runs, mean: average(runs.map(lastOf)) }));
  const { svg, X, box } = axes(where, {
    height, x: [low - pad, high + pad], y: [0, 1], yTicks: [], yTitle: title, xTitle: `at ${many(tokens)} tokens, the only record`,
    label: `${title} after ${many(tokens)} tokens, means over seeds. ${means.map(({ group, mean }) => `${group.label} ends at ${loss(mean)}`).join("; ")}.`,
    xTicks: (room) => linearTicks(low - pad, high + pad, clamp(Math.round(room / 90), 2, 8)),
  });
  if (kind === "difference") svg.append(make("line", { class: "zero", x1: X(0), x2: X(0), y1: box.top, y2: box.bottom }));
  const middle = (i) => box.top + step * i + 29;
  means.forEach(({ group, runs, mean }, i) => {
    svg.append(make("text", arm(group, "ending", { x: box.left, y: middle(i) - 13 }), group.label));
    svg.append(make("line", { class: "gridline", x1: box.left, x2: box.right, y1: middle(i), y2: middle(i) }));
    for (const run of runs) svg.append(make("circle", arm(group, "seed", { cx: X(lastOf(run)), cy: middle(i), r: 4 })));
    svg.append(make("path", arm(group, "line mean", { d: `M${X(mean).toFixed(1)},${middle(i) - 8}L${X(mean).toFixed(1)},${middle(i) + 8}` })));
  });
  if (!means.length) return;
  explore(svg, {
    topic: kind,
    locate: (px, py) => clamp(Math.floor((py - box.top) / step), 0, means.length - 1),
    move: (i, dx, dy) => clamp((i ?? -1) + dx + dy, 0, means.length - 1),
    marks: (i) => [make("rect", { class: "cursor", x: box.left - 6, y: box.top + step * i, width: box.right - box.left + 6, height: step })],
    show: (i) => ({
      title: means[i].group.label, at: [X(means[i].mean), middle(i)],
      lines: [{ name: "mean", value: loss(means[i].mean), near: true }, ...means[i].runs.map((run) => ({ name: run.seed === null ? "run" : `seed ${run.seed}`, value: loss(lastOf(run)) }))],
    }),
  });
}

function drawLoss() {
  const room = 66 + 14 * Math.min(groups.length, 30); // for every name at the end of its line
  drawCurves("eval", "validation loss, nats per token", Math.max(340, room), "No evaluation was recorded.");
  drawCurves("train", "training loss, nats per token", 270, "No training loss was recorded.");
  const lone = groups.length === 1 ? "There is nothing to subtract: the page shows one residual."
    : "No run has an evaluated baseline with the same settings and seed.";
  drawCurves("difference", "difference in nats per token; below zero is better", 270, lone);
  const recorded = Math.max(...groups.flatMap((group) => ["eval", "train"].map((kind) => group.curves[kind].recorded)));
  const thinned = recorded > data.points ? `Curves are thinned for this page: at most ${data.points} of up to ${recorded} recorded points each. ` : "";
  const several = groups.some((group) => group.curves.train.runs.length > 1);
  const dots = document.querySelector(".loss circle.seed") ? "A dot is a seed, the line beside it their mean. " : "";
  host("strokes").textContent = dots + (several ? `Thick: the mean over seeds. Thin: each seed${groups.length > CROWD ? " of the residual under the pointer" : ""}.` : "");
  host("thinned").textContent = `${thinned}Training loss is a moving average over ${Math.max(...groups.map((group) => group.curves.train.window))} records.`;
}
