// Hovering, touching and the arrow keys all choose a point. Charts on one topic are linked: each marks the point in its
// own way, and the one that was touched says what is there. A mouse takes its words along; a finger leaves them standing
// until it touches something else.

const views = new Set();
const tip = host("tip");
let active = null;

function explore(svg, view) {
  Object.assign(view, { svg, layer: svg.appendChild(make("g", { class: "marks" })), point: null });
  views.add(view);
  const pointer = (event) => {
    const edge = svg.getBoundingClientRect();
    choose(view, view.locate(event.clientX - edge.left, event.clientY - edge.top));
  };
  svg.addEventListener("pointermove", pointer);
  svg.addEventListener("pointerdown", pointer);
  // Scrolling moves charts away from a pointer that rests: what the arrow keys chose elsewhere stays chosen.
  svg.addEventListener("pointerleave", (event) => { if (active === view && event.pointerType !== "touch") leave(); });
  svg.addEventListener("blur", () => { if (active === view) leave(); });  // a finger has chosen elsewhere by now
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    choose(view, view.move(view.point, ...step));
  });
}

function leave() {
  active = null;
  tip.hidden = true;
  light(null);
  for (const view of views) {
    if (!view.svg.isConnected) views.delete(view);
    view.point = null;
    view.layer.replaceChildren();
  }
}

function choose(view, point) {
  leave();
  if (point === null) return;
  active = view;
  view.point = point;
  for (const other of views) if (other.topic === view.topic) other.layer.replaceChildren(...other.marks(point));
  const { title, lines, at } = view.show(point);
  tip.replaceChildren(make("b", {}, title), ...lines.map(({ key, name, value, near }) =>
    make("div", near ? { class: "near" } : {}, ...(key ? [key] : []), make("span", {}, name), make("span", {}, value))));
  tip.hidden = false;
  const edge = view.svg.getBoundingClientRect(), x = edge.left + at[0], y = edge.top + at[1];
  const besides = x + 16 + tip.offsetWidth < innerWidth ? x + 16 : x - 16 - tip.offsetWidth;
  const left = clamp(besides, 8, Math.max(8, document.documentElement.clientWidth - tip.offsetWidth - 8));
  const top = clamp(y - tip.offsetHeight - 12, 8, Math.max(8, innerHeight - tip.offsetHeight - 8));
  tip.style.left = `${left + scrollX}px`;
  tip.style.top = `${top + scrollY}px`;
}

addEventListener("pointerdown", (event) => { if (!event.target.closest?.("svg[tabindex]")) leave(); });
