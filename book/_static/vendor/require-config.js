// Read by require.js when it starts. With this folder as base, a front-end module that a widget
// asks for, and the icon fonts of embed-amd.js, come from here and not from a CDN.
var require = { baseUrl: document.documentElement.dataset.content_root + "_static/vendor/" };

// Widgets typeset their labels through MathJax 2's queue; pass that on to MathJax 3, where a page
// has it. MathJax is loaded by then, and this listener is older than the widgets' own.
window.addEventListener("load", () => {
  if (window.MathJax) {
    window.MathJax.Hub = { Queue: ([, , element]) => window.MathJax.typesetPromise([element]) };
  }
});
