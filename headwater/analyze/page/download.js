// What the report offers to download.

const curveRows = (kind) => [["residual", "seed", "tokens", kind === "difference" ? "difference" : "loss"], ...groups.flatMap((group) =>
  curvesOf(group, kind).flatMap((run) => run.x.map((tokens, i) => [group.label, run.seed, tokens, run.y[i]])))];
function mapRows() {
  const drawn = deep.filter((group) => (state.rows === "difference" ? subtractable(group) : frameOf(group).mixing));
  const rowsOf = (group, frame, read) => weightsOf(group, frame, read).map((weight, source) => [group.label, frame.step, read, source, weight]);
  const rows = drawn.flatMap((group) => [...everyRead(group)].flatMap((read) => rowsOf(group, frameOf(group), read)));
  return [["residual", "step", "read", "source", SCALE_TITLES[state.rows].split(",")[0]], ...rows];
}
const measureRows = (key) => [["residual", "step", "sublayer", "kind", key], ...deep.flatMap((group) =>
  (frameOf(group)[key] || []).map((value, i) => [group.label, frameOf(group).step, i, group.depth.kinds[i] ?? "final read", value]))];
function tableRows() {
  const keys = Object.keys(groups[0].results[0]);
  return [["residual", ...keys], ...groups.flatMap((group) => group.results.map((run) => [group.label, ...keys.map((key) => run[key])]))];
}

function mixingRows() {
  const cellValue = ({ dataset, textContent }) => (dataset.value === undefined ? textContent : Number(dataset.value));
  return [...host("mixing").rows].map((row) => [...row.cells].map(cellValue));
}

function addKey(root, where, width, y, side) {
  const shown = groups.filter((group) => where.querySelector(`[data-arm="${group.index}"]`));
  if (where.querySelector(".title") || where.querySelector(".ending")) return y + 12;
  let x = side;
  for (const group of shown) {
    const name = document.querySelector(`.legend [data-arm="${group.index}"] code`), room = 40 + 8.6 * group.label.length;
    if (x > side && x + room > width - side) { x = side; y += 22; }
    const stroke = getComputedStyle(name.previousElementSibling).color, dashes = { look1: "6 4", look2: "2 4", look3: "10 4 2 4" }[group.look.split(" ")[1]];
    root.append(make("line", { x1: x, x2: x + 20, y1: y + 6, y2: y + 6, stroke, "stroke-width": 3, "stroke-dasharray": dashes }));
    root.append(written(group.label, x + 26, y + 10, name));
    x += room;
  }
  return y + 30;
}

const SAVES = {
  table: [null, "Results", tableRows], mixing: [null, "Measures of the maps", mixingRows], page: [null, "Everything", null],
  eval: ["eval", "Validation loss", () => curveRows("eval")], train: ["train", "Training loss, smoothed", () => curveRows("train")],
  difference: ["difference", "Validation loss, minus the baseline", () => curveRows("difference")], maps: ["maps", "What each sublayer reads", mapRows],
  ...Object.fromEntries(MEASURES.map(([key, title]) => [`measure-${key}`, [`measure-${key}`, title, () => measureRows(key)]])),
};
function addSaves() {
  for (const where of document.querySelectorAll(".save")) {
    const name = where.dataset.save, [id, title, rows] = SAVES[name];
    const button = (...what) => saveButton(where, title, ...what);
    const drawing = () => picture(host(id).querySelector(".grid") || host(id), title, name === "maps" ? host("scale").querySelector("svg") : null);
    if (id) button("PNG", "picture", () => rasterize(drawing(), (blob) => save(`${name}.png`, "image/png", blob)));
    if (id) button("SVG", "picture that scales", () => save(`${name}.svg`, "image/svg+xml", drawing().text));
    if (rows) button("CSV", "numbers as a table", () => save(`${name}.csv`, "text/csv", csv(rows())));
    else button("JSON", "all the numbers of this page", () => save("page.json", "application/json", JSON.stringify(data)));
  }
}
