// How nodes are made, and the choice among words. Text enters a page through textContent only, so a name is never read
// as markup.

const host = (id) => document.getElementById(id);
const VECTORS = new Set(["svg", "g", "path", "line", "rect", "circle", "text", "image"]);
function make(tag, attributes = {}, ...children) {
  const node = VECTORS.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
const parts = (name) => name.split(/(?<=[:,])/).flatMap((part) => [part, make("wbr")]);  // a long name breaks between its options
const empty = (where, words) => where.replaceChildren(make("p", { class: "empty" }, words));

function light(group) {
  document.body.classList.toggle("lit", Boolean(group));
  for (const node of document.querySelectorAll("[data-arm]")) node.classList.toggle("on", Boolean(group) && node.dataset.arm === String(group.index));
}

function choice(name, title, options, current, change) {
  const field = make("fieldset", { class: "choice", "aria-label": title || name }, ...(title ? [make("legend", {}, title)] : []));
  for (const [value, words] of options) {
    const input = make("input", { type: "radio", name, value });
    input.checked = value === current();
    input.addEventListener("change", () => change(value));
    field.append(make("label", {}, input, words));
  }
  return field;
}
