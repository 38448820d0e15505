// Light, dark, or as the system has it. Runs before the page is drawn, so that it never flashes in the other one.
(() => {
  const wantsDark = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try {
      return localStorage.getItem("headrace-theme") ?? "system";
    } catch {
      return "system"; // the browser keeps nothing
    }
  };
  let chosen = kept();
  const apply = () => {
    document.documentElement.dataset.theme = chosen === "system" ? (wantsDark.matches ? "dark" : "light") : chosen;
    dispatchEvent(new Event("theme-changed")); // canvases draw again
  };
  wantsDark.addEventListener("change", apply);
  addEventListener("storage", ({ key }) => {
    if (key !== "headrace-theme") return;
    chosen = kept();
    apply();
  });
  window.theme = {
    get chosen() { return chosen; },
    choose(name) {
      chosen = name;
      try {
        localStorage.setItem("headrace-theme", name);
      } catch { /* for this page only */ }
      apply();
    },
  };
  apply();
})();
