{{- define "everstep.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "everstep.labels" -}}
app.kubernetes.io/name: everstep
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "everstep.hasVolume" -}}
{{- if not .Values.storage.uri }}yes{{ end }}
{{- end }}

{{- define "everstep.claim" -}}
{{ .Values.storage.volume.existingClaim | default (printf "%s-storage" .Release.Name) }}
{{- end }}

{{- define "everstep.storageUri" -}}
{{ .Values.storage.uri | default "/var/lib/everstep/storage" }}
{{- end }}

{{- define "everstep.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - {name: {{ . | quote }}}
  {{- end }}
{{- end }}
{{- end }}

{{- define "everstep.containerSecurity" -}}
allowPrivilegeEscalation: false
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* How every part reaches the storage and Ray. */}}
{{- define "everstep.commonEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN_PATH, value: /run/secrets/ray/auth_token}
{{- if and .Values.storage.uri .Values.storage.credentials }}
- {name: AWS_SHARED_CREDENTIALS_FILE, value: /run/secrets/storage/credentials}
- {name: AWS_EC2_METADATA_DISABLED, value: "true"}
{{- end }}
{{- end }}

{{- define "everstep.commonMounts" -}}
{{- if include "everstep.hasVolume" . }}
- {name: storage, mountPath: /var/lib/everstep/storage}
{{- else if .Values.storage.credentials }}
- {name: storage-credentials, mountPath: /run/secrets/storage, readOnly: true}
{{- end }}
- {name: ray-token, mountPath: /run/secrets/ray, readOnly: true}
{{- end }}

{{- define "everstep.commonVolumes" -}}
{{- if include "everstep.hasVolume" . }}
- name: storage
  persistentVolumeClaim: {claimName: {{ include "everstep.claim" . }}}
{{- else if .Values.storage.credentials }}
- name: storage-credentials
  secret: {secretName: {{ .Values.storage.credentials }}, defaultMode: 0440}
{{- end }}
- name: ray-token
  secret: {secretName: {{ .Values.secrets.ray }}, defaultMode: 0440}
{{- end }}

{{/* Ray's settings on every node, as in docker-compose.yml (docs/operations.md, What makes recovery fast). */}}
{{- define "everstep.rayEnv" -}}
- {name: PYTHONHASHSEED, value: "0"} # all ranks list sets in one order
- {name: RAY_idle_worker_killing_time_threshold_ms, value: "1000000000"}
- {name: RAY_JOB_STOP_SIGNAL, value: SIGINT}
- {name: RAY_JOB_STOP_WAIT_TIME_S, value: "10"}
- {name: RAY_kill_worker_timeout_milliseconds, value: "500"}
- {name: RAY_health_check_initial_delay_ms, value: "10000"}
- {name: RAY_health_check_period_ms, value: "5000"}
- {name: RAY_health_check_timeout_ms, value: "10000"}
- {name: RAY_health_check_failure_threshold, value: "12"}
- {name: RAY_gcs_rpc_server_reconnect_timeout_s, value: "600"}
- {name: RAY_raylet_start_wait_time_s, value: "120"}
{{- end }}

{{- define "everstep.serviceAccount" -}}
{{- if .Values.storage.serviceAccountAnnotations }}
serviceAccountName: {{ .Release.Name }}-storage
{{- end }}
{{- end }}
