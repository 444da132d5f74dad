// The prompt, coloured by how surprising each token was; the one chosen, and what the model expected after it.

// Black or white, whichever stands out more: at the worst 4.6 to 1.
function inkOn(colour) {
  const [r, g, b] = colour.match(/\d+/g).map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}
function paintOn(node, share) {
  node.style.background = ramp("--heat")(share);
  node.style.color = inkOn(node.style.background);
}
const surpriseOf = (t) => (t ? average(models.map((model) => model.loss[t - 1])) : null);  // of the token itself, as the one before it saw it
const HARD = 8;  // nats, where the colour is full: one in three thousand

function drawTokens() {
  const every = make("button", { type: "button", role: "radio", class: "every" }, "average of all");
  const nodes = tokens.map((place, t) => {
    const node = make("button", { type: "button", role: "radio", title: t ? `${loss(surpriseOf(t))} nats` : "nothing stands before it" }, words(place));
    if (t) paintOn(node, 0.85 * Math.sqrt(clamp(surpriseOf(t) / HARD, 0, 1)));
    else Object.assign(node.style, { background: "none", color: "inherit" });
    return node;
  });
  const all = [every, ...nodes];
  all.forEach((node, i) => {
    node.dataset.token = i ? i - 1 : "all";
    node.addEventListener("click", () => pick({ token: i ? i - 1 : "all" }));
    node.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      all[clamp(i + step, 0, all.length - 1)].focus();
      pick({ token: i + step < 1 ? "all" : Math.min(i + step, tokens.length) - 1 });
    });
  });
  const lines = nodes.flatMap((node, t) => (data.texts[tokens[t]].includes("\n") ? [node, make("br")] : [node]));
  host("tokens").replaceChildren(every, ...lines);
  drawSurprise();
}
function drawSurprise() {
  const svg = make("svg", { width: 250, height: 34, role: "img", "aria-label": `Colour scale of loss, 0 to ${HARD} nats` }), colour = ramp("--heat");
  svg.append(make("text", { class: "name", x: 0, y: 11 }, models.length > 1 ? "loss of the token, mean of both, nats" : "loss of the token, nats"));
  for (let i = 0; i < 50; i++) svg.append(make("rect", { x: i * 4, y: 15, width: 4.5, height: 7, fill: colour(0.85 * Math.sqrt(i / 50)) }));
  for (const value of [0, 1, 4, HARD]) svg.append(make("text", { x: (200 * value) / HARD, y: 34, "text-anchor": value ? "middle" : "start" }, value === HARD ? `≥ ${value}` : String(value)));
  host("surprise").replaceChildren(svg);
}
function markToken() {
  for (const node of host("tokens").querySelectorAll("button")) {
    const on = node.dataset.token === String(state.token);
    node.setAttribute("aria-checked", String(on));
    node.tabIndex = on ? 0 : -1;
    if (on) showInside(host("tokens"), node);
  }
}
function showInside(box, node) {  // scrolls the box and never the page
  const top = node.getBoundingClientRect().top - box.getBoundingClientRect().top + box.scrollTop, bottom = top + node.offsetHeight;
  if (top < box.scrollTop) box.scrollTop = top - 6;
  else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight + 6;
}
function drawSummary() {
  host("summary").replaceChildren(...models.map((model) => make("p", {}, ...(models.length > 1 ? [swatch(model), make("code", {}, clip(model.name, 60)), " "] : []), ...sentence(model))));
}
function sentence(model) {
  const token = chosen();
  if (token === null) return [`Average over ${tokens.length} tokens: loss ${loss(average([...model.loss]))} nats a token.`];
  const [first] = topOf(model.reads, model.depth), next = nextOf();
  const start = [`After token ${token}, `, tokenNode(tokens[token]), ", it expects ", tokenNode(first.place), ` (${percent(first.p)}). `];
  if (next === null) return [...start, "The text ends here: there is no loss to compare with."];
  const what = [...start, "What follows is ", tokenNode(next), ` (${percent(Math.exp(-model.loss[token]))}): loss ${loss(model.loss[token])} nats.`];
  if (!model.removedAt) return what;
  const read = Math.min(state.read, model.depth), source = Math.min(state.source, read);
  return [...what, ` Without the ${sourceName(model, source)}, ${placeName(model, read)}, the loss changes by `, make("strong", {}, nats(effectsOf(model, read)[source])), "."];
}
