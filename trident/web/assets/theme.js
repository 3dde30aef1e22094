/* Before anything is drawn: the theme that was chosen in this browser, or none, which leaves it to the system. */
"use strict";
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem("stormproof-theme");
  } catch (refused) {
    /* a browser may refuse to keep anything: the system's theme is used */
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
