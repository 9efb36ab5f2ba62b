{{- define "muster.keeper" -}}
{{ include "muster.fullname" . }}-keeper
{{- end }}

{{- define "muster.keeper.identity" -}}
{{ include "muster.identity" . }}
app.kubernetes.io/component: keeper
{{- end }}

{{- define "muster.keeper.serviceAccount" -}}
{{- $account := .Values.keeper.serviceAccount }}
{{- if $account.create }}
{{- default (include "muster.keeper" .) $account.name }}
{{- else }}
{{- default "default" $account.name }}
{{- end }}
{{- end }}

{{- define "muster.keeper.endpoint" -}}
{{ default (printf "%s:%v" (include "muster.host" .) .Values.service.grpcPort) .Values.keeper.endpoint }}
{{- end }}

{{- /* Whether they run as root, without any of its rights: for jobs that do. */}}
{{- define "muster.keeper.root" -}}
{{- if eq (toString .Values.keeper.podSecurity.runAsUser) "0" }}yes{{ end }}
{{- end }}

{{- define "muster.keeper.args" -}}
{{- $keeper := .Values.keeper -}}
- keep
- --folder={{ $keeper.folder }}
{{- range $keeper.runs }}
- {{ printf "--runs=%s" . | quote }}
{{- end }}
- --idle={{ int64 $keeper.idle }}
- --listen={{ include "muster.bindHost" . }}:0
# The ranks are in other pods of the node.
- --listen-ranks=$(MUSTER_NODE_ADDRESS):0
{{- if $keeper.quota }}
- --quota={{ int64 $keeper.quota }}
{{- end }}
{{- if $keeper.uploadRate }}
- --upload-rate={{ int64 $keeper.uploadRate }}
{{- end }}
{{- end }}

{{- define "muster.checkKeeper" -}}
{{- $keeper := .Values.keeper }}
{{- if $keeper.enabled }}
{{- if and .Values.tokens.enabled (not $keeper.client.tokenSecret) (not .Values.tokens.serviceAccounts.enabled) }}
{{- fail "tokens.enabled: the keepers need a token, too, of role worker and for every run that they keep for: set keeper.client.tokenSecret, or tokens.serviceAccounts.enabled=true with a rule for their service account." }}
{{- end }}
{{- if and .Values.tls.clientAuth.enabled (not $keeper.client.certificateSecret) }}
{{- fail "tls.clientAuth.enabled: the keepers need a certificate, too: set keeper.client.certificateSecret." }}
{{- end }}
{{- if and $keeper.chown (kindIs "invalid" $keeper.podSecurity.runAsUser) }}
{{- fail "keeper.chown: set the folder's owner in keeper.podSecurity.runAsUser, or set keeper.chown=false and have it made on the nodes." }}
{{- end }}
{{- end }}
{{- end }}
