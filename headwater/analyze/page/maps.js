// Maps: which read takes from which source. One scale for all, so that colours mean the same in each.

const everyRead = (group) => group.depth.kinds.concat("final").keys();

function drawMaps() {
  if (!deep.some((group) => group.depth.frames.some((frame) => frame.mixing))) return empty(host("maps"), "No depth-mixing weights were recorded.");
  const drawn = groups.filter((group) => group.depth && (state.rows === "difference" ? subtractable(group) : group.depth.frames.some((frame) => frame.mixing)));
  const weightsIn = (group, frame) => [...everyRead(group)].flatMap((read) => known(weightsOf(group, frame, read)));
  const every = drawn.flatMap((group) => group.depth.frames.filter((frame) => frame.mixing).flatMap((frame) => weightsIn(group, frame)));
  // The first reads have few sources and so large weights; the scale ends below the largest hundredth, or they would fade the rest.
  const sizes = every.map(Math.abs).sort((a, b) => a - b), top = sizes.at(-1) || 1, hundredth = sizes[Math.floor(sizes.length * 0.99)] || top;
  const most = hundredth < 0.9 * top ? hundredth : top, paint = painter(most);
  drawScale(SCALE_TITLES[state.rows], most, most < top, every.some((value) => value < 0), paint);
  const panels = groups.filter((group) => visible(group) && !(state.rows === "difference" && group.baseline)).map((group) => {
    const map = make("div", { class: "map" }), panel = make("div", { class: "panel" }, panelTitle(group), map);
    return { group, map, panel };
  });
  host("maps").replaceChildren(...panels.map(({ panel }) => panel));
  for (const { group, map } of panels) {
    if (drawn.includes(group)) drawMap(map, group, drawn, paint);
    else empty(map, state.rows === "difference" && group.depth ? "It has no baseline of the same depth." : "No depth records.");
  }
}

const SCALE_TITLES = { share: "share of the row, one scale for all", applied: "weight, one scale for all", difference: "share minus the baseline's" };
function drawMap(where, group, drawn, paint) {
  const frame = frameOf(group), count = group.depth.kinds.length, columns = count + 1;
  if (!frame.mixing) return empty(where, `No depth-mixing weights at step ${frame.step}.`);
  const reads = [...group.depth.kinds.keys()].filter((i) => state.reads === "all" || group.depth.kinds[i] === state.reads).concat(count);
  const left = 46, top = 4, gap = 5, room = Math.min(560, where.clientWidth - left - 4);
  const size = clamp(Math.floor((room / columns) * 2) / 2, 3, 30), tall = (size * columns - gap) / reads.length;
  const X = (column) => left + column * size, Y = (r) => top + r * tall + (r === reads.length - 1 ? gap : 0);
  const right = X(columns), bottom = Y(reads.length - 1) + tall;
  const label = `Depth-mixing map of ${group.label}: ${reads.length} reads by ${columns} sources`;
  const svg = make("svg", { width: Math.max(right + 4, 230), height: bottom + 44, role: "img", tabindex: 0, "aria-label": label });
  const values = reads.map((read) => weightsOf(group, frame, read));
  const canvas = paintCells(values, { size, tall, width: right - left, height: bottom - top, row: (r) => Y(r) - top }, paint);
  Object.assign(canvas.style, { left: `${left}px`, top: `${top}px` });
  labelMap(svg, group, reads, { X, Y, left, bottom, size, tall });
  where.replaceChildren(canvas, svg);
  exploreMap(svg, group, drawn, reads, { X, Y, left, top, bottom, size, tall, gap, where });
}
function labelMap(svg, group, reads, { X, Y, left, bottom, size, tall }) {
  const count = group.depth.kinds.length;
  const strip = (kind, x, y, w, h) => svg.append(make("rect", { class: `kind${hollow(kind)}`, x, y, width: w, height: h, "stroke-width": 0.6 }));
  reads.slice(0, -1).forEach((read, r) => strip(group.depth.kinds[read], left - 8, Y(r) + tall * 0.14, 4, tall * 0.72));
  group.depth.kinds.forEach((kind, i) => strip(kind, X(i + 1) + size * 0.14, bottom + 4, size * 0.72, 4));
  const every = (space, needed) => [1, 2, 4, 8, 16, 32, 64].find((stride) => stride * space >= needed) || 128;
  const down = every(tall, 15), across = every(size, 22);
  reads.forEach((read, r) => {
    const last = r === reads.length - 1, room = r % down === 0 && (reads.length - 1 - r) * tall >= 13;
    const name = { x: left - 13, y: Y(r) + tall / 2 + 4, "text-anchor": "end", class: last ? "name" : "" };
    if (last || room) svg.append(make("text", name, last ? "final" : String(read)));
  });
  for (let i = 0; i < count; i += across) if ((i + 1) * size >= 30) svg.append(make("text", { x: X(i + 1.5), y: bottom + 21, "text-anchor": "middle" }, String(i)));
  svg.append(make("text", { class: "name", x: X(0.5), y: bottom + 21, "text-anchor": "middle" }, "emb"), make("text", { x: 0, y: bottom + 38 }, "rows: reads, columns: sources"));
}
function exploreMap(svg, group, drawn, reads, { X, Y, left, top, bottom, size, tall, gap, where }) {
  explore(svg, {
    topic: "depth",
    locate: (px, py) => {
      const column = Math.floor((px - left) / size), r = Math.min(reads.length - 1, Math.floor((py - top - (py >= Y(reads.length - 1) ? gap : 0)) / tall));
      return r >= 0 && column >= 0 && column <= reads[r] && py <= bottom ? { read: reads[r], source: column } : null;
    },
    move: (point, dx, dy) => {
      const r = clamp((point ? reads.indexOf(point.read) : reads.length - 1) + dy, 0, reads.length - 1);
      return { read: reads[r], source: clamp((point?.source ?? 0) + dx, 0, reads[r]) };
    },
    marks: ({ read, source }) => {
      const r = reads.indexOf(read);
      if (r < 0) return [];
      const cell = source === null ? { x: X(0), width: size * (read + 1) } : { x: X(source), width: size };
      return [make("rect", { class: "cursor cell", y: Y(r), height: tall, ...cell })];
    },
    show: ({ read, source }) => ({
      title: readName(group, read), at: [X(source) - where.scrollLeft, Y(reads.indexOf(read))],
      lines: [{ name: sourceName(group, source), value: "" }, ...drawn.filter((other) => visible(other) && read <= other.depth.kinds.length && frameOf(other).mixing).map((other) =>
        ({ key: swatch(other), name: other.label, value: short(weightsOf(other, frameOf(other), read)[source] ?? null, 3), near: other === group }))],
    }),
  });
}

// A first look beside the headline: the shares at the last recorded step.

function drawThumbnail() {
  const mapped = groups.filter((group) => group.depth?.frames.at(-1).mixing), group = mapped.find((one) => !one.baseline) || mapped[0];
  if (!group) return;
  const frame = group.depth.frames.at(-1), columns = group.depth.kinds.length + 1, size = 132 / columns;
  const values = [...everyRead(group)].map((read) => shares(frame.mixing.slice((read * (read + 1)) / 2, (read * (read + 1)) / 2 + read + 1)));
  const sizes = values.flat().map(Math.abs).sort((a, b) => a - b);
  const canvas = paintCells(values, { size, tall: size, width: 132, height: 132, row: (r) => r * size }, painter(sizes[Math.floor(sizes.length * 0.97)] || 1));
  host("thumbnail").replaceChildren(canvas, make("span", {}, "who reads whom in ", make("code", {}, ...parts(group.label))));
  host("thumbnail").hidden = false;
}
