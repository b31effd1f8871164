// A way back from Ray's dashboard: a link in the corner to Everstep, and on the page of a job to its run.
"use strict";
(() => {
  const link = document.createElement("a");
  link.id = "everstep-back";
  link.textContent = "← Everstep";

  // Ray's page changes its address without an event, so look when the link is about to be used.
  function aim() {
    const job = /^#\/jobs\/([A-Za-z0-9_-]+)/.exec(location.hash);
    link.href = job ? `/ray-jobs/${job[1]}` : "/runs";
    link.title = job ? "The run of this job" : "All runs";
  }

  for (const event of ["pointerenter", "focus", "click"]) link.addEventListener(event, aim);
  aim();
  document.body.append(link);
})();
