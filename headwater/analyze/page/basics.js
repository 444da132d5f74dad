// The report's data and its state. The controls change `state`; every chart is drawn again from it.

const data = JSON.parse(document.getElementById("data").textContent);
const groups = data.groups.map((group, index) => Object.assign(group, { index }));
const state = { hidden: new Set(), range: "all", reads: "all", rows: "share", step: Infinity, log: {} };
const CROWD = 6;  // more residuals than this, and one at a time is lit

const visible = (group) => !state.hidden.has(group);
const baselineOf = (group) => (group.against === null ? null : groups[group.against]);
const arm = (group, kind, attributes = {}) => ({ class: `${kind} ${group.look}`, "data-arm": group.index, ...attributes });
const swatch = (group) => make("i", { class: `key ${group.look}` });
const panelTitle = (group) => make("p", { class: "title" }, swatch(group), make("code", {}, ...parts(group.label)));
