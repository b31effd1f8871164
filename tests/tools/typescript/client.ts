// Submit a run and read it, with types that openapi-typescript made of /openapi.json: `client.js URL TOKEN`.
import createClient from "openapi-fetch";
import type { components, paths } from "./everstep.js";

declare const process: { argv: string[] };
const [url, token] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: url, headers: { Authorization: `Bearer ${token}` } });

function check(fact: boolean, what: string): asserts fact {
  if (!fact) throw new Error(what);
}

const spec: components["schemas"]["RunSpec"] = {
  name: "generated",
  task: { name: "image_classification", model: { name: "mini_resnet" }, data: { name: "digits" } },
  train: { epochs: 2 },
};
// @ts-expect-error the types refuse a field that there is not
const mistyped: components["schemas"]["RunSpec"] = { ...spec, prioritty: 3 };
// @ts-expect-error and a value of another type
const wrong: components["schemas"]["RunSpec"] = { ...spec, priority: "high" };
// @ts-expect-error and a spec without a name
const nameless: components["schemas"]["RunSpec"] = { task: spec.task };

const headers = { "idempotency-key": "once" };
const made = await client.POST("/v1/runs", { body: spec, params: { header: headers } });
check(made.data !== undefined, `refused: ${JSON.stringify(made.error)}`);
const status: components["schemas"]["RunStatus"] = made.data.status;
check(status === "QUEUED" && made.data.name === "generated", "another run was made");
check(!Number.isNaN(Date.parse(made.data.created_at)), "created_at is no time");

const again = await client.POST("/v1/runs", { body: spec, params: { header: headers } });
check(again.response.status === 200 && again.data?.id === made.data.id, "made twice");

const path = { run_id: made.data.id };
const found = await client.GET("/v1/runs/{run_id}", { params: { path } });
check(found.data?.id === made.data.id && found.data.step === 0, "another run was found");
const listed = await client.GET("/v1/runs", { params: { query: { status: ["QUEUED"], limit: 1 } } });
check(listed.data?.items.length === 1 && listed.data.next_cursor === null, "the list is wrong");
const events = await client.GET("/v1/runs/{run_id}/events", { params: { path } });
check(typeof events.data === "object", "events came as a stream"); // which only `Accept` asks for
check(events.data.items[0]?.kind === "run_created", "the first event is wrong");

const missing = await client.GET("/v1/runs/{run_id}", { params: { path: { run_id: "run_000000000000" } } });
check(missing.error?.code === "not_found", "a missing run was found");
const refused = await client.POST("/v1/runs", { body: { ...spec, train: { epochs: 0 } } });
check(refused.error?.errors?.[0]?.loc.join(".") === "train.epochs", JSON.stringify(refused.error));
console.log(made.data.id);
