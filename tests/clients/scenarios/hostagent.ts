// Scenario that a test runs with types made from docs/openapi/hostagent.json: URL as argument, TOKEN in the environment.
import createClient from "openapi-fetch";
import type { components, paths } from "./generated_hostagent.js";

declare const process: { argv: string[]; env: Record<string, string | undefined> };
type Vm = components["schemas"]["VMStatus"];

// With a manager's token and without Accept, problems would be told in the words of 0.1 (docs/reference/rest.md).
const client = createClient<paths>({
  baseUrl: process.argv[2] ?? "",
  headers: { Accept: "application/json, application/problem+json", Authorization: `Bearer ${process.env["TOKEN"]}` },
});

function check(holds: boolean, what: unknown): asserts holds {
  if (!holds) throw new Error(JSON.stringify(what));
}

async function low(): Promise<Vm> {
  const { data, error } = await client.GET("/v1/vms/{name}", { params: { path: { name: "low" } } });
  check(data !== undefined, error);
  return data;
}

const before = await low();
const body = { request_id: "room", epoch: 1, need: { cpu_cores: 1 } };
const begun = await client.POST("/v1/reclaims", { body });
check(begun.data !== undefined && begun.response.status === 202, begun.error);

const params = { path: { request_id: "room" }, query: { wait_s: 30 } };
const { data: ended, error } = await client.GET("/v1/operations/{request_id}", { params });
check(ended !== undefined, error);
check(ended.state === "done", ended.sentence);
const after = await low();
check(after.current.cpu_cores < before.current.cpu_cores, [before, after]);
check(ended.vms[0]?.after.cpu_cores === after.current.cpu_cores, ended.vms);

const again = await client.POST("/v1/reclaims", { body: { ...body, need: { cpu_cores: 2 } } });
check(again.data === undefined && again.response.status === 409 && again.error?.code === "request-id-reused", again);
