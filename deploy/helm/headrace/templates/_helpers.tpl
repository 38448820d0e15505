{{- define "headrace.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- /* The pods of a StatefulSet have its name and a hash in one label, of 63 characters. */}}
{{- define "headrace.fullname" -}}
{{- $most := ternary 52 63 (eq .Values.workload "StatefulSet") }}
{{- $name := include "headrace.name" . }}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- .Values.fullnameOverride | default $both | trunc $most | trimSuffix "-" }}
{{- end }}

{{- define "headrace.selectorLabels" -}}
app.kubernetes.io/name: {{ include "headrace.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "headrace.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "headrace.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "headrace.metadata" -}}
name: {{ include "headrace.fullname" . | quote }}
namespace: {{ .Release.Namespace | quote }}
labels:
  {{- include "headrace.labels" . | nindent 2 }}
{{- end }}

{{- define "headrace.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (ternary (include "headrace.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "headrace.image" -}}
{{- with .Values.image }}
{{- .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- /* After the drain the server has 3 s for its connections and 10 s for its engine; 2 s are to spare. */}}
{{- define "headrace.gracePeriod" -}}
{{- add .Values.preStopSleep (ceil .Values.settings.drain_timeout) 15 }}
{{- end }}

{{- define "headrace.environmentFromSecret" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret.existingSecret | quote }}
      key: {{ .secret.key | quote }}
{{- end }}

{{- /* What no schema can say: combinations that would be installed and not work. */}}
{{- define "headrace.validate" -}}
{{- $v := .Values }}
{{- $name := include "headrace.fullname" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "%q cannot name a Service: set fullnameOverride to a letter, and letters, digits and \"-\" after it" $name) }}
{{- end }}
{{- range $setting, $value := dict "port" "port" "api_keys" "apiKeys.existingSecret" "admin_keys" "adminKeys.existingSecret" "api_keys_file" "tenants.existingSecret" }}
{{- if hasKey $v.settings $setting }}
{{- fail (printf "settings.%s is not taken: set the chart's own %s" $setting $value) }}
{{- end }}
{{- end }}
{{- if hasKey $v.settings "reuse_port" }}
{{- fail "settings.reuse_port is not taken: a pod has its port alone" }}
{{- end }}
{{- range $label, $value := include "headrace.labels" . | fromYaml }}
{{- if hasKey ($v.podLabels | default dict) $label }}
{{- fail (printf "podLabels: %s is the chart's own; selectors go by such labels" $label) }}
{{- end }}
{{- end }}
{{- $prefix := $v.settings.metrics_prefix | default "vllm:" }}
{{- if and (ne $prefix "vllm:") (or $v.prometheusRule.enabled $v.inferencePool.enabled) }}
{{- fail (printf "settings.metrics_prefix is %q, and prometheusRule and inferencePool read metrics that begin with \"vllm:\"" $prefix) }}
{{- end }}
{{- if and $v.serviceMonitor.enabled (or $v.apiKeys.existingSecret $v.tenants.existingSecret) (not $v.serviceMonitor.authorization.existingSecret) }}
{{- fail "apiKeys or tenants make /metrics ask for a key: name a Secret with one in serviceMonitor.authorization.existingSecret" }}
{{- end }}
{{- $hosts := $v.settings.allowed_hosts | default "*" }}
{{- if and $v.ingress.enabled (ne $hosts "*") (not (has $v.ingress.host (splitList "," $hosts))) }}
{{- fail (printf "settings.allowed_hosts is %q, and requests come with the host %q of the ingress: add it" $hosts $v.ingress.host) }}
{{- end }}
{{- $ranks := mul ($v.settings.tensor_parallel_size | default 1 | int) ($v.settings.pipeline_parallel_size | default 1 | int) }}
{{- if gt ($v.gpu.count | int) (mul $ranks ($v.settings.data_parallel_size | default 1 | int) | int) }}
{{- fail (printf "gpu.count is %v, and an engine uses one device for each of its processes: set settings.tensor_parallel_size to as many, or settings.data_parallel_size, and settings.engine to process" $v.gpu.count) }}
{{- end }}
{{- if gt ($v.autoscaling.minReplicas | int) ($v.autoscaling.maxReplicas | int) }}
{{- fail (printf "autoscaling.minReplicas is %v, and autoscaling.maxReplicas %v" $v.autoscaling.minReplicas $v.autoscaling.maxReplicas) }}
{{- end }}
{{- end }}
