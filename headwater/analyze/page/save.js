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
  for (const name of where.querySelectorAll(".title:has(code)")) {
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
  root.prepend(make("rect", { width, height, fill: page.backgroundColor }), written(title, side, 30, document.querySelector("h3") || document.querySelector("h2")));
  return { text: new XMLSerializer().serializeToString(root), width, height };
}
function rasterize({ text, width, height }, done) {
  const image = new Image(), canvas = make("canvas", { width: 2 * width, height: 2 * height });
  image.onload = () => { canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height); canvas.toBlob(done, "image/png"); };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}
function saveButton(where, title, words, about, act) {
  const made = make("button", { type: "button", "aria-label": `Download ${title}: ${about}`, title: `Download ${about}` }, words);
  made.addEventListener("click", act);
  where.append(made);
}
