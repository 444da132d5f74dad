// What is drawn, as a picture; what it was drawn from, as numbers. Both are made in the page and never leave the machine.

function save(name, type, content) {
  const link = make("a", { href: URL.createObjectURL(new Blob([content], { type })), download: `headwater-${name}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// A name that begins like a formula would be run by a spreadsheet: an apostrophe keeps it text.
function csv(rows) {
  const field = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "string") return String(value);
    const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return rows.map((row) => row.map(field).join(",") + "\n").join("");
}
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
  const cellValue = ({ dataset, textContent }) => (dataset.value === undefined ? textContent : Number(dataset.value));
  if (document.body.classList.contains("matrix")) return [...host("table").rows].map((row) => [...row.cells].map(cellValue));
  const keys = Object.keys(groups[0].results[0]);
  return [["residual", ...keys], ...groups.flatMap((group) => group.results.map((run) => [group.label, ...keys.map((key) => run[key])]))];
}

// A picture holds what the eye sees: charts where they stand, with the colours they have now, and names above them.

const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight", "display"];
function withLooks(node) {
  const copy = node.cloneNode(true), pairs = [[node, copy]];
  while (pairs.length) {
    const [from, to] = pairs.pop(), style = getComputedStyle(from);
    to.removeAttribute("class");
    for (const name of LOOKS) to.setAttribute(name, style.getPropertyValue(name));
    [...from.children].forEach((child, i) => pairs.push([child, to.children[i]]));
  }
  return copy;
}
const written = (words, x, y, node) => {
  const style = getComputedStyle(node);
  return make("text", { x, y, fill: style.color, "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight }, words);
};
function picture(where, title, scale) {
  const edge = where.getBoundingClientRect(), page = getComputedStyle(document.body), top = 56, side = 20;
  const width = Math.ceil(Math.max(edge.width, ...[...where.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect().right - edge.left))) + 2 * side;
  const root = make("svg", { xmlns: "http://www.w3.org/2000/svg", width });
  const at = (node) => { const box = node.getBoundingClientRect(); return { x: box.left - edge.left + side, y: box.top - edge.top + top, width: box.width, height: box.height }; };
  for (const name of where.querySelectorAll(".title")) {
    const box = at(name), colour = getComputedStyle(name.querySelector(".key")).color;
    root.append(make("circle", { cx: box.x + 5, cy: box.y + 11, r: 5, fill: colour }), written(name.textContent, box.x + 18, box.y + 15, name.querySelector("code")));
  }
  for (const canvas of where.querySelectorAll("canvas")) root.append(make("image", { href: canvas.toDataURL(), ...at(canvas) }));
  const put = (svg, place) => {
    const copy = withLooks(svg);
    for (const [name, value] of Object.entries({ ...place, overflow: "visible" })) copy.setAttribute(name, value);
    root.append(copy);
  };
  for (const svg of where.querySelectorAll("svg")) put(svg, at(svg));
  if (scale) put(scale, { x: width - side - 250, y: 8 });
  const height = Math.ceil(addKey(root, where, width, edge.height + top + 8, side));
  root.setAttribute("height", height);
  root.prepend(make("rect", { width, height, fill: page.backgroundColor }), written(title, side, 30, document.querySelector("h3")));
  return { text: new XMLSerializer().serializeToString(root), width, height };
}
function addKey(root, where, width, y, side) {
  const shown = groups.filter((group) => where.querySelector(`[data-arm="${group.index}"]`));
  if (where.querySelector(".title") || where.querySelector(".ending")) return y + 12;
  let x = side;
  for (const group of shown) {
    const name = document.querySelector(`.legend [data-arm="${group.index}"] code`), room = 40 + 8.6 * group.label.length;
    if (x > side && x + room > width - side) { x = side; y += 22; }
    const stroke = getComputedStyle(name.previousElementSibling).color, dashes = { look1: "6 4", look2: "2 4" }[group.look.split(" ")[1]];
    root.append(make("line", { x1: x, x2: x + 20, y1: y + 6, y2: y + 6, stroke, "stroke-width": 3, "stroke-dasharray": dashes }));
    root.append(written(group.label, x + 26, y + 10, name));
    x += room;
  }
  return y + 30;
}
function rasterize({ text, width, height }, done) {
  const image = new Image(), canvas = make("canvas", { width: 2 * width, height: 2 * height });
  image.onload = () => { canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height); canvas.toBlob(done, "image/png"); };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

const SAVES = {
  table: [null, "Results", tableRows], page: [null, "Everything", null],
  eval: ["eval", "Validation loss", () => curveRows("eval")], train: ["train", "Training loss, smoothed", () => curveRows("train")],
  difference: ["difference", "Validation loss, minus the baseline", () => curveRows("difference")], maps: ["maps", "What each sublayer reads", mapRows],
  ...Object.fromEntries(MEASURES.map(([key, title]) => [`measure-${key}`, [`measure-${key}`, title, () => measureRows(key)]])),
};
function addSaves() {
  for (const where of document.querySelectorAll(".save")) {
    const name = where.dataset.save, [id, title, rows] = SAVES[name];
    const button = (words, about, act) => {
      const made = make("button", { type: "button", "aria-label": `Download ${title}: ${about}`, title: `Download ${about}` }, words);
      made.addEventListener("click", act);
      where.append(made);
    };
    const drawing = () => picture(host(id).querySelector(".grid") || host(id), title, name === "maps" ? host("scale").querySelector("svg") : null);
    if (id) button("PNG", "picture", () => rasterize(drawing(), (blob) => save(`${name}.png`, "image/png", blob)));
    if (id) button("SVG", "picture that scales", () => save(`${name}.svg`, "image/svg+xml", drawing().text));
    if (rows) button("CSV", "numbers as a table", () => save(`${name}.csv`, "text/csv", csv(rows())));
    else button("JSON", "all the numbers of this page", () => save("page.json", "application/json", JSON.stringify(data)));
  }
}
