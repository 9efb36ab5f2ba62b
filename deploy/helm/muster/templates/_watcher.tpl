{{- define "muster.watcher" -}}
{{ include "muster.fullname" . }}-watcher
{{- end }}

{{- define "muster.watcher.identity" -}}
{{ include "muster.identity" . }}
app.kubernetes.io/component: watcher
{{- end }}

{{- define "muster.watcher.serviceAccount" -}}
{{- $account := .Values.watcher.serviceAccount }}
{{- if $account.create }}
{{- default (include "muster.watcher" .) $account.name }}
{{- else }}
{{- default "default" $account.name }}
{{- end }}
{{- end }}

{{- /* A ClusterRole has no namespace: those of two releases need two names. */}}
{{- define "muster.watcher.clusterRole" -}}
{{ .Release.Namespace }}-{{ include "muster.watcher" . }}
{{- end }}

{{- define "muster.watcher.endpoint" -}}
{{ default (printf "%s:%v" (include "muster.host" .) .Values.service.grpcPort) .Values.watcher.endpoint }}
{{- end }}

{{- /* Whether the watchers read from the API server. */}}
{{- define "muster.watcher.kubernetes" -}}
{{- if and .Values.watcher.enabled (has "kubernetes" .Values.watcher.sources) }}yes{{ end }}
{{- end }}

{{- define "muster.watcher.args" -}}
{{- $watcher := .Values.watcher -}}
- watch
{{- range $watcher.sources }}
- --source={{ . }}
{{- end }}
- --lead={{ int64 $watcher.lead }}
{{- if $watcher.interval }}
- --interval={{ $watcher.interval }}
{{- end }}
- --http={{ include "muster.bindHost" . }}:7551
{{- if include "muster.watcher.kubernetes" . }}
{{- range $watcher.kubernetes.namespaces }}
- --namespace={{ . }}
{{- end }}
{{- with $watcher.kubernetes.podSelector }}
- {{ printf "--pod-selector=%s" . | quote }}
{{- end }}
- --cordon={{ $watcher.kubernetes.cordon }}
{{- range $watcher.kubernetes.taints }}
- {{ printf "--taint=%s" . | quote }}
{{- end }}
{{- if $watcher.kubernetes.evictions }}
- --evictions
{{- end }}
{{- if $watcher.annotate }}
- --annotate
{{- end }}
{{- end }}
{{- end }}

{{- define "muster.checkWatcher" -}}
{{- $watcher := .Values.watcher }}
{{- if $watcher.enabled }}
{{- if and .Values.tokens.enabled (not $watcher.client.tokenSecret) (not .Values.tokens.serviceAccounts.enabled) }}
{{- fail "tokens.enabled: the watchers need a token, too, of role watcher and for all nodes: set watcher.client.tokenSecret, or tokens.serviceAccounts.enabled=true with a rule for their service account." }}
{{- end }}
{{- if and .Values.tls.clientAuth.enabled (not $watcher.client.certificateSecret) }}
{{- fail "tls.clientAuth.enabled: the watchers need a certificate, too: set watcher.client.certificateSecret." }}
{{- end }}
{{- if and $watcher.kubernetes.evictions (not (has "kubernetes" $watcher.sources)) }}
{{- fail "watcher.kubernetes.evictions needs kubernetes in watcher.sources." }}
{{- end }}
{{- if and $watcher.kubernetes.evictions (not $watcher.kubernetes.namespaces) }}
{{- fail "watcher.kubernetes.evictions: say in which namespaces the jobs are in watcher.kubernetes.namespaces." }}
{{- end }}
{{- if and $watcher.annotate (not (has "kubernetes" $watcher.sources)) }}
{{- fail "watcher.annotate needs kubernetes in watcher.sources: its pods lead to the objects." }}
{{- end }}
{{- if and $watcher.annotate (not $watcher.kubernetes.namespaces) }}
{{- fail "watcher.annotate: say in which namespaces the jobs are in watcher.kubernetes.namespaces." }}
{{- end }}
{{- end }}
{{- end }}
