"use strict";
// Runs before the first paint, so that a chosen theme never flashes: system, then what was chosen.
(() => {
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem("theme"); } catch { return null; } };
  if (stored()) root.dataset.theme = stored();
  window.toggleTheme = () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* private window */ }
    dispatchEvent(new Event("theme"));
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("theme")));
})();
