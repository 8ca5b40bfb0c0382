"use strict";
// g + letter goes to a page, / to the search, j and k walk rows, t turns the time range, . the theme, ? lists keys.
(() => {
  const dialog = document.getElementById("keys");
  const actions = { theme: () => toggleTheme(), keys: () => dialog && !dialog.open && dialog.showModal() };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-action]");
    if (button) actions[button.dataset.action]();
  });
  const step = (by) => {
    const rows = [...document.querySelectorAll("[data-row]")].filter((row) => row.offsetParent);
    if (!rows.length) return;
    const at = rows.findIndex((row) => row.contains(document.activeElement));
    const row = rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + by, 0), rows.length - 1)];
    const link = row.matches("a") ? row : row.querySelector("a");
    if (!link) return;
    link.focus();
    row.scrollIntoView({ block: "nearest" });
  };
  const turn = () => {
    const ranges = [...document.querySelectorAll(".ranges a")];
    const at = ranges.findIndex((link) => link.hasAttribute("aria-current"));
    if (ranges.length) location.assign(ranges[(at + 1) % ranges.length].href);
  };
  const search = () => {
    const input = document.querySelector("input[type=search]");
    if (input) input.select(); else document.querySelector('[data-key="t"]')?.click();
  };
  const plain = { "/": search, j: () => step(1), k: () => step(-1), t: turn, ".": actions.theme, "?": actions.keys };
  // On a narrow screen tabs are one line that scrolls: begin where the page is.
  // Not by scrollIntoView, after which Chromium 150 begins to tab from there.
  for (const here of document.querySelectorAll(".tabs > [aria-current]"))
    here.parentElement.scrollLeft = here.offsetLeft - here.parentElement.offsetLeft - (here.parentElement.clientWidth - here.offsetWidth) / 2;
  // A browser leaves a tab that is cut off as it is.
  for (const tabs of document.querySelectorAll(".tabs"))
    tabs.addEventListener("focusin", (event) => event.target.scrollIntoView({ block: "nearest", inline: "nearest" }));
  // What opens over the page closes when the focus goes on below it.
  document.addEventListener("focusin", (event) => {
    for (const open of document.querySelectorAll(":popover-open"))
      if (!open.contains(event.target)) open.hidePopover();
  });
  let went = 0;
  addEventListener("keydown", (event) => {
    if (event.target.matches("input, textarea, select") || event.metaKey || event.ctrlKey || event.altKey) return;
    if (dialog && dialog.open) return;
    if (went && Date.now() - went < 1500) {
      went = 0;
      const link = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); location.assign(link.href); return; }
    }
    if (event.key === "g") { went = Date.now(); return; }
    const act = plain[event.key];
    if (act) { event.preventDefault(); act(); }
  });
})();
