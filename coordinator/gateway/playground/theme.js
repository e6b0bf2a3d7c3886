// Light, dark, or as the system has it. Runs before the page is painted.
"use strict";

{
  const THEMES = ["system", "light", "dark"];
  const KEY = "outrider-theme";

  const read = () => {
    try {
      return THEMES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "system";
    } catch {
      return "system"; // storage is closed to this page
    }
  };

  const keep = (theme) => {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // the choice lasts as long as the page
    }
  };

  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  };

  apply(read());
  document.addEventListener("DOMContentLoaded", () => {
    apply(read());
    document.getElementById("theme").addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
      keep(next);
      apply(next);
    });
  });
}
