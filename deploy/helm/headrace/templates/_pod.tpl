{{- define "headrace.pod" -}}
metadata:
  labels:
    {{- include "headrace.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "headrace.serviceAccountName" . | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "headrace.gracePeriod" . }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- range $name := list "imagePullSecrets" "nodeSelector" "affinity" "topologySpreadConstraints" "priorityClassName" }}
  {{- with index $.Values $name }}
  {{ $name }}: {{ toJson . }}
  {{- end }}
  {{- end }}
  {{- with .Values.gpu.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- if or .Values.tolerations .Values.gpu.count }}
  tolerations:
    {{- with .Values.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- if .Values.gpu.count }}
    - {key: {{ .Values.gpu.resourceName }}, operator: Exists, effect: NoSchedule}
    {{- end }}
  {{- end }}
  containers:
    - name: headrace
      image: {{ include "headrace.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      ports:
        - {name: http, containerPort: {{ .Values.port }}}
      env:
        {{- include "headrace.environment" . | nindent 8 }}
      # The port answers as soon as the process runs; until the model is loaded the others do not count.
      startupProbe:
        httpGet: {path: /startupz, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ divf .Values.startupTimeout 5 | ceil }}
      # Not ready while the queue is full, if that counts, so quick both ways.
      readinessProbe:
        httpGet: {path: "/readyz{{ with .Values.readiness.exclude }}?exclude={{ . }}{{ end }}", port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # Fails after settings.stall_limit without a step, or when the engine has died; never because it is busy.
      livenessProbe:
        httpGet: {path: /livez, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      {{- if .Values.preStopSleep }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ .Values.preStopSleep }}}
      {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      resources:
        {{- $resources := deepCopy .Values.resources }}
        {{- if .Values.gpu.count }}
        {{- $devices := dict .Values.gpu.resourceName .Values.gpu.count }}
        {{- $resources = mergeOverwrite $resources (dict "limits" $devices "requests" $devices) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: cache, mountPath: /cache}
        - {name: tmp, mountPath: /tmp}
        {{- if .Values.models }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if .Values.tenants.existingSecret }}
        - {name: tenants, mountPath: /etc/headrace, readOnly: true}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: 1Gi}
    {{- if ne .Values.workload "StatefulSet" }}
    - name: cache
      {{- if .Values.cache.existingClaim }}
      persistentVolumeClaim: {claimName: {{ .Values.cache.existingClaim | quote }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ .Values.cache.size }}}
      {{- end }}
    {{- end }}
    {{- with .Values.models }}
    - name: models
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with .Values.tenants }}
    {{- if .existingSecret }}
    - name: tenants
      secret:
        secretName: {{ .existingSecret | quote }}
        defaultMode: 0440
        items: [{key: {{ .key | quote }}, path: tenants.toml}]
    {{- end }}
    {{- end }}
{{- end }}

{{- define "headrace.environment" -}}
- {name: HEADRACE_PORT, value: {{ .Values.port | quote }}}
- {name: HF_HOME, value: /cache/huggingface}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
{{- range $name, $value := .Values.settings }}
{{- /* toJson, because a large number would print as 1e+06. */}}
- {name: HEADRACE_{{ upper $name }}, value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}}
{{- end }}
{{- if and .Values.gpu.count (not .Values.settings.device) }}
- {name: HEADRACE_DEVICE, value: cuda}
{{- end }}
{{- range $name, $secret := dict "HEADRACE_API_KEYS" .Values.apiKeys "HEADRACE_ADMIN_KEYS" .Values.adminKeys "HF_TOKEN" .Values.hubToken }}
{{- if $secret.existingSecret }}
{{ include "headrace.environmentFromSecret" (dict "name" $name "secret" $secret) }}
{{- end }}
{{- end }}
{{- if .Values.tenants.existingSecret }}
- {name: HEADRACE_API_KEYS_FILE, value: /etc/headrace/tenants.toml}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
