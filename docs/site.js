// A table that scrolls sideways can be reached with the keyboard. The theme wraps tables while the page loads.
new MutationObserver(() => {
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) wrap.tabIndex = 0;
}).observe(document.body, { childList: true, subtree: true });
