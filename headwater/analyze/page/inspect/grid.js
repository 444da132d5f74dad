// The grid of reads by sources, one for each model, on one scale.

const TITLES = { share: "share of the row", weight: "weight as applied", brought: "weight × size of the source", effect: "change of loss without it, nats" };
const cellsOf = (model, read) => ({ share: sharesOf, weight: weightsOf, brought: broughtOf, effect: effectsOf }[state.value](model, read));
const shownModels = () => models.filter((model) => state.value !== "effect" || model.removedAt);

const residualOf = (model) => (model.residual === model.name ? [] : [" ", make("small", {}, ...parts(clip(model.residual, 80)))]);  // by default it is the name

function drawGrid() {
  const every = shownModels().flatMap((model) => Array.from({ length: model.depth + 1 }, (_, read) => known(cellsOf(model, read))).flat());
  // The largest hundredth would fade the rest: the first reads have few sources and so large weights.
  const sizes = every.map(Math.abs).sort((a, b) => a - b), top = sizes.at(-1) || 1, hundredth = sizes[Math.floor(sizes.length * 0.99)] || top;
  const most = hundredth < 0.9 * top ? hundredth : top, paint = painter(most);
  drawScale(TITLES[state.value], most, most < top, every.some((value) => value < 0), paint);
  const grids = models.map((model) => make("div", { class: "panel" }, panelTitle(model, ...residualOf(model)), make("div", { class: "map" }), ...(model.meaning ? [make("p", { class: "caption" }, model.meaning)] : [])));
  const tables = models.map((model) => make("div", { class: "panel" }));
  host("grid").replaceChildren(...grids, ...tables);
  models.forEach((model, i) => { drawMap(grids[i].querySelector(".map"), model, paint); drawSources(tables[i], model); });
}

function drawMap(where, model, paint) {
  if (state.value === "effect" && !model.removedAt) return empty(where, "Effects at one read were not computed for this model: --removals pairs does.");
  if (state.value === "effect" && chosen() !== null && nextOf() === null) return empty(where, "The last token has no next one whose loss could change. Pick another.");
  const count = model.depth + 1, left = 46, top = 4, room = Math.min(520, where.clientWidth - left - 4);
  const size = clamp(Math.floor((room / count) * 2) / 2, 5, 30), X = (column) => left + column * size, Y = (row) => top + row * size;
  const svg = make("svg", { width: X(count) + 4, height: Y(count) + 48, role: "img", tabindex: 0, "data-model": model.index, "aria-label": `${clip(model.name)}: ${count} reads by ${count} sources, ${TITLES[state.value]}` });
  const values = Array.from({ length: count }, (_, read) => cellsOf(model, read));
  const canvas = paintCells(values, { size, tall: size, width: size * count, height: size * count, row: (r) => r * size }, paint);
  Object.assign(canvas.style, { left: `${left}px`, top: `${top}px` });
  labelMap(svg, model, { X, Y, left, size, count });
  const read = Math.min(state.read, model.depth), source = Math.min(state.source, read);
  svg.append(make("rect", { class: "cursor", x: X(0), y: Y(read), width: size * (read + 1), height: size }), make("rect", { class: "cursor cell", x: X(source), y: Y(read), width: size, height: size }));
  where.replaceChildren(canvas, svg);
  exploreMap(svg, model, { X, Y, left, top, size, count, where });
}
function labelMap(svg, model, { X, Y, left, size, count }) {
  const every = (needed) => [1, 2, 4, 8, 16, 32, 64].find((stride) => stride * size >= needed) || 128, down = every(13), across = every(16);
  const letter = (kind, x, y) => svg.append(size >= 12 ? make("text", { class: `kindmark ${kindOf(kind)[2]}`, x, y, "text-anchor": "middle" }, kindOf(kind)[0])
    : make("rect", { class: `kindmark ${kindOf(kind)[2]}`, x: x - 0.36 * size, y: y - 4 - 0.36 * size, width: 0.72 * size, height: 0.72 * size }));  // no room for a letter
  model.kinds.forEach((kind, i) => {
    letter(kind, left - 10, Y(i) + size / 2 + 4);
    letter(kind, X(i + 1.5), Y(count) + 13);
    if (i % down === 0) svg.append(make("text", { x: left - 18, y: Y(i) + size / 2 + 4, "text-anchor": "end" }, String(i)));
    if (i % across === 0) svg.append(make("text", { x: X(i + 1.5), y: Y(count) + 26, "text-anchor": "middle" }, String(i)));
  });
  svg.append(make("text", { class: "name", x: left - 5, y: Y(count - 1) + size / 2 + 4, "text-anchor": "end" }, "head"));
  svg.append(make("text", { class: "name", x: X(0.5), y: Y(count) + 13, "text-anchor": "middle" }, "e"), make("text", { x: left, y: Y(count) + 44 }, "columns: sources, e the embedding"));
}
function exploreMap(svg, model, { X, Y, left, top, size, count, where }) {
  let last = null;
  explore(svg, {
    topic: "grid",
    locate: (px, py) => {
      const source = Math.floor((px - left) / size), read = Math.floor((py - top) / size);
      last = read >= 0 && read < count && source >= 0 && source <= read ? { read, source } : null;
      return last;
    },
    move: (point, dx, dy) => {
      const from = point || { read: Math.min(state.read, model.depth), source: state.source }, read = clamp(from.read + dy, 0, count - 1);
      return (last = { read, source: clamp(from.source + dx, 0, read) });
    },
    marks: ({ read, source }) => [make("rect", { class: "cursor cell", x: X(source), y: Y(read), width: size, height: size })],
    show: ({ read, source }) => ({
      title: readName(model, read), at: [X(source) - where.scrollLeft, Y(read)],
      lines: [{ name: sourceName(model, source), value: "" }, { name: "weight", value: short(weightsOf(model, read)[source], 6) }, { name: "share of the row", value: short(sharesOf(model, read)[source], 3) }, { name: "weight × size", value: short(broughtOf(model, read)[source], 3) },
        ...(model.removedAt ? [{ name: "loss without it here", value: nats(effectsOf(model, read)[source]) }] : []), ...(model.removed ? [{ name: "loss without it anywhere", value: nats(effectOf(model, source)) }] : [])],
    }),
  });
  svg.addEventListener("click", () => { if (last) pick(last); });
  svg.addEventListener("keydown", (event) => { if (event.key === "Enter" && last) { pick(last); document.querySelector(`#grid svg[data-model="${model.index}"]`).focus(); } });
}
