// Swagger UI over this server's own description. Keys are the dashboard's, and go out as it sends them.
import { keys } from "../../dashboard/files/server.js";

const ADMIN = ["/server_info", "/engine_state", "/reset_prefix_cache", "/abort_requests", "/configure_logging", "/v1/models/load", "/v1/models/unload", "/sleep", "/wake_up",
  "/start_profile", "/stop_profile"];

function begin() {
  window.SwaggerUIBundle({
    url: "openapi.json",
    dom_id: "#api",
    deepLinking: true,
    docExpansion: "list",
    defaultModelsExpandDepth: 0,
    displayRequestDuration: true,
    validatorUrl: null, // it would ask a server elsewhere
    requestInterceptor: (request) => {
      const { origin, pathname } = new URL(request.url, document.baseURI);
      const key = keys.get(ADMIN.some((path) => pathname.endsWith(path)) ? "admin" : "client");
      if (origin === location.origin && key) request.headers.authorization = `Bearer ${key}`;
      return request;
    },
  });
}

for (const kind of ["client", "admin"]) document.getElementById(kind).value = keys.get(kind);
document.getElementById("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  for (const kind of ["client", "admin"]) keys.set(kind, document.getElementById(kind).value.trim());
  begin();
});
begin();
